import time, torch, numpy as np, sys
from viper import VariationalLogisticRegression as V
import viper.problem as P, viper.fused as Fu

print(torch.__version__, torch.cuda.get_device_name())
import triton

print("triton", triton.__version__)


def data(n, p, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    X = torch.randn(n, p, dtype=torch.float64, device="cuda", generator=g)
    b = torch.randn(p, dtype=torch.float64, device="cuda", generator=g) * 0.5
    y = torch.rand(n, device="cuda", generator=g) < torch.sigmoid(X @ b)
    return X, y


# correctness fused vs plain
from viper.fitting import *
from viper.mode import without_variance
from viper.steps import largest_curvature

X, y = data(200_003, 7)
for single in (False, True):
    for w in (None, torch.rand(len(X), dtype=torch.float64, device="cuda")):
        b = P.Block(P.Dense(X, True), y.double(), None if w is None else w * 0.1, None, w)
        mu = torch.randn(8, dtype=torch.float64, device="cuda") * 0.3
        F = torch.randn(8, 8, dtype=torch.float64, device="cuda").triu() * 0.01
        ch = build("viper", None, None, None, None, None).moments
        ro = build("viper", None, None, None, None, 1e-8).moments
        for f, fac, prog in (
            (without_variance, None, Fu.Program("softplus")),
            (largest_curvature, None, Fu.Program("quarter")),
            (ch, F, heat_program(HEAT_TOLERANCE, 8)),
            (ro, F, heat_program(1e-8, 4)),
        ):
            Fu.PROGRAMS[f] = prog
            try:
                a = P.row_sums(b, mu, fac, f, "full", single, True)
            except Exception as e:
                print("FAIL", prog.kind, single, type(e), str(e)[:1500])
                continue
            Fu.PROGRAMS.pop(f)
            c = P.row_sums(b, mu, fac, f, "full", single, True)
            print(
                prog.kind,
                single,
                w is not None,
                [float((x - z).abs().max() / (z.abs().max() + 1e-300)) for x, z in zip(a, c)],
            )


def T(f, k=5):
    ts = []
    for _ in range(k):
        torch.cuda.synchronize()
        t = time.perf_counter()
        f()
        torch.cuda.synchronize()
        ts.append(time.perf_counter() - t)
    return ts


for n, p in ((1_719_400, 6), (20_000_000, 25), (100_000_000, 25)):
    X, y = data(n, p)
    ts = T(lambda: V(random_state=0).fit(X, y), 6)
    m = V(random_state=0).fit(X, y)
    print(n, p, "first %.3f best %.5f median %.5f" % (ts[0], min(ts), np.median(ts)), m.passes_, m.converged_, m.elbo_)
    for h in m.history_:
        print(h)
