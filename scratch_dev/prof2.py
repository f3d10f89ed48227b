import time, torch, cProfile, pstats
from viper import VariationalLogisticRegression as V

g = torch.Generator("cuda").manual_seed(0)
for n, p in ((1_719_400, 6), (20_000_000, 25)):
    X = torch.randn(n, p, dtype=torch.float64, device="cuda", generator=g)
    b = torch.randn(p, dtype=torch.float64, device="cuda", generator=g) * 0.5
    y = torch.rand(n, device="cuda", generator=g) < torch.sigmoid(X @ b)
    for _ in range(3):
        V(random_state=0).fit(X, y)
    pr = cProfile.Profile()
    pr.enable()
    for _ in range(10):
        V(random_state=0).fit(X, y)
    pr.disable()
    pstats.Stats(pr).sort_stats("cumtime").print_stats(45)
