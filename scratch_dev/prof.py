import time, torch, numpy as np, sys, itertools
import viper.problem as P, viper.fused as Fu, viper.fused_kernel as K
import triton


def data(n, p, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    X = torch.randn(n, p, dtype=torch.float64, device="cuda", generator=g)
    b = torch.randn(p, dtype=torch.float64, device="cuda", generator=g) * 0.5
    y = torch.rand(n, device="cuda", generator=g) < torch.sigmoid(X @ b)
    return X, y


def T(f, k=5):
    f()
    ts = []
    for _ in range(k):
        torch.cuda.synchronize()
        t = time.perf_counter()
        f()
        torch.cuda.synchronize()
        ts.append(time.perf_counter() - t)
    return min(ts) * 1e3


for n, p, W in ((1_719_400, 6, 16), (10_000_000, 25, 32)):
    X, y = data(n, p)
    Y = y.double()
    mu = torch.randn(p + 1, dtype=torch.float64, device="cuda") * 0.1
    F = torch.randn(p + 1, p + 1, dtype=torch.float64, device="cuda").triu() * 1e-4
    th, v, g, h = (torch.empty(n, dtype=torch.float64, device="cuda") for _ in range(4))
    props = torch.cuda.get_device_properties(0).multi_processor_count
    print("sum", T(lambda: bool(X.sum().isfinite())))

    def lat(R, w, U, var, single):
        t = triton.cdiv(n, R)
        return lambda: K.latent_kernel[(min(t, U * props),)](
            X, mu, F, th, v, n, X.stride(0), t, p, p + 1, W, R, var, single, num_warps=w
        )

    def gat(R, w, U, gram, single):
        t = triton.cdiv(n, R)
        pr = min(t, U * props)
        out = torch.empty(pr, W + W * W, dtype=torch.float64, device="cuda")
        return lambda: K.gather_kernel[(pr,)](
            X, g, h, out, n, X.stride(0), t, p, p + 1, W, R, gram, single, num_warps=w
        )

    for R, w, U in (
        (16, 1, 16),
        (16, 1, 32),
        (16, 2, 16),
        (32, 1, 8),
        (32, 1, 16),
        (32, 2, 8),
        (32, 2, 16),
        (32, 2, 32),
        (64, 2, 8),
        (64, 1, 16),
        (128, 4, 8),
    ):
        print(
            n,
            R,
            w,
            U,
            "lat",
            ["%.3f" % T(lat(R, w, U, *a), 3) for a in ((False, False), (True, False))],
            "gather",
            ["%.3f" % T(gat(R, w, U, *a), 3) for a in ((False, False), (True, False))],
            flush=True,
        )
