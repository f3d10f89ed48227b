"""How close is close: every tolerance the tests use, and why it is that number.

All are relative, for float64, unless the sentence says otherwise. A test that needs a looser number writes
it beside the assertion, with the reason.
"""

TOLERANCE = {
    # The same quantity by two formulas, a few dozen operations each: tens of units in the last place.
    "roundoff": 1e-14,
    # Against mpmath, through functions whose own error is a few units and is amplified by exp: erfcx, log_ndtr.
    "special": 1e-13,
    # A derivative in closed form against autograd, which takes differences of nearly equal terms on the way.
    "autograd": 1e-11,
    # A derivative against central differences with the best step, ε^(1/3): error about ε^(2/3).
    "differences": 1e-8,
    # Two routes to the same optimum, each stopped at a relative change of the ELBO of 1e-9.
    "converged": 1e-7,
    # The same computation in float32: tens of its units in the last place (1.2e-7).
    "float32": 1e-5,
}
