"""Power laws: the loss of models against the compute that they were trained with.

    L = a C^-b              form "power", a straight line on logarithmic axes
    L = e + a C^-b          form "irreducible", with a loss e that no compute takes away

The fit is to the mean of log L of each level: a level counts once, however many runs (seeds) it has. The scatter of
levels about the law is estimated from their residuals, that of runs about their level from the runs; a level is never
known better than its runs allow. The bootstrap is parametric, because a ladder has few levels and four residuals are no
distribution to draw from: each sample draws these two scales by the chi-square distribution of their estimates, then
new levels, then fits again. For the plain power law with one run a level the intervals are Student's: they contain the
next level as often as they say. With several runs a level they contain it somewhat more often.

Shapes: S samples of the bootstrap, L levels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Form = Literal["power", "irreducible"]
PARAMETERS: dict[str, int] = {"power": 2, "irreducible": 3}
CONFIDENCE = 0.95
# Of the bootstrap. With a thousand, the ends of intervals move by a twentieth of their width from seed to seed.
SAMPLES: dict[str, int] = {"power": 200_000, "irreducible": 20_000}
_EXPONENTS = np.geomspace(1e-3, 4.0, 41)  # where the search for b begins
_ZOOMS = 7
_LARGEST_LOG = 700.0  # exp of more is infinite
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Prediction:
    """The loss by a law at one x or several, and the interval that a new level falls into 95 times of 100."""

    value: Any
    low: Any
    high: Any

    def contains(self, y: ArrayLike) -> Any:
        """Return whether measured values lie inside the interval."""
        inside = (np.asarray(y) >= self.low) & (np.asarray(y) <= self.high)
        return bool(inside) if inside.ndim == 0 else inside


@dataclass(frozen=True, eq=False)
class PowerLaw:
    """A fitted law, L = e + a C^-b."""

    form: Form
    a: float
    b: float
    e: float
    """Zero for the form "power"."""
    r_squared: float
    """Of the levels, in log L: the share of their variance that the law explains."""
    r_squared_runs: float
    """The same of all runs, which differ by their seeds as well."""
    intervals: dict[str, tuple[float, float]]
    """Of each coefficient, 95%."""
    levels: tuple[float, ...]
    """The distinct x that it was fitted to, ascending."""
    runs: tuple[int, ...]
    """How many runs each of them had."""
    level_error: float
    """Standard deviation of log L of a level (the mean of its runs) about the law."""
    run_error: float
    """Standard deviation of log L of a run about its level; zero if no level has two."""
    seed: int
    _samples: dict[str, Array] = field(repr=False)  # log_a, b, e, level and run variance, [S] each

    def __call__(self, x: ArrayLike) -> Any:
        """Return the loss by the law, without an interval."""
        value = np.exp(_log_law(_log(x), math.log(self.a), self.b, self.e))
        return float(value) if value.ndim == 0 else value

    def predict(self, x: ArrayLike, runs: float | None = None) -> Prediction:
        """Predict the loss of a new level.

        Args:
            x: Compute; one number gives floats, several give arrays.
            runs: New runs whose mean the interval is for; None: as many as the levels had on average.
        """
        if runs is not None and not runs > 0:
            raise ValueError(f"runs must be positive, got {runs}")
        log_x = np.atleast_1d(_log(x))
        drawn = self._samples
        mean_runs = _harmonic_mean(self.runs)
        variance_S = drawn["level"] - drawn["run"] / mean_runs + drawn["run"] / (runs or mean_runs)
        # The same at all places, so that a band has smooth edges.
        noise_S = np.random.default_rng([self.seed, 1]).standard_normal(len(variance_S)) * np.sqrt(variance_S)
        low, high = self._ends(log_x, noise_S)
        value = np.exp(_log_law(log_x, math.log(self.a), self.b, self.e))
        if np.ndim(x) == 0:
            return Prediction(float(value[0]), float(low[0]), float(high[0]))
        return Prediction(value, low, high)

    def formula(self) -> str:
        """Write the law with its coefficients and R², for the legend of a figure (matplotlib's math text)."""
        constant = f"{self.e:.2f} + " if self.form == "irreducible" else ""
        # Digits enough to tell 0.9996 from 1.
        fit = f"{self.r_squared:.3f}" if self.r_squared < 0.9995 else f"{self.r_squared:.5f}"
        return f"{constant}{_in_math(self.a)} $C^{{{-self.b:.3f}}}$, $R^2$ = {fit}"

    def _ends(self, log_x: Array, noise_S: Array) -> tuple[Array, Array]:
        """The interval at each place."""
        drawn = self._samples
        ends = [
            np.quantile(_log_law(place, drawn["log_a"], drawn["b"], drawn["e"]) + noise_S, _tails()) for place in log_x
        ]
        low, high = _exp(np.array(ends).reshape(-1, 2).T)
        return low, high

    def describe(self) -> dict[str, Any]:
        """Return everything but the samples as plain JSON."""
        return {
            "form": self.form,
            **{name: getattr(self, name) for name in self.intervals},
            "intervals": {name: list(ends) for name, ends in self.intervals.items()},
            "r_squared": self.r_squared,
            "r_squared_runs": self.r_squared_runs,
            "levels": list(self.levels),
            "runs": list(self.runs),
            "level_error": self.level_error,
            "run_error": self.run_error,
        }


def fit_power_law(
    x: ArrayLike, y: ArrayLike, *, form: Form = "power", bootstrap: int | None = None, seed: int = 0
) -> PowerLaw:
    """Fit a power law to losses y at computes x.

    Args:
        x: FLOPs, or anything positive. Runs of the same x are seeds of one level.
        y: their losses, positive.
        form: "power" takes three levels or more, "irreducible" four.
        bootstrap: samples that the intervals rest on; None: `SAMPLES`.
        seed: of the bootstrap. The same input gives the same result.
    """
    if form not in PARAMETERS:
        raise ValueError(f"form must be one of {tuple(PARAMETERS)}, got {form!r}")
    bootstrap = SAMPLES[form] if bootstrap is None else bootstrap
    if bootstrap < 100:
        raise ValueError(f"bootstrap must be at least 100 samples, got {bootstrap}")
    computes, losses = _checked(x, y)
    levels, place = np.unique(computes, return_inverse=True)
    if len(levels) <= PARAMETERS[form]:
        raise ValueError(
            f"x has {len(levels)} distinct levels, but form {form!r} takes at least {PARAMETERS[form] + 1}: "
            "with fewer nothing is left to say how well the law fits"
        )
    counts = np.bincount(place)
    log_x, log_y = np.log(levels), np.log(losses)
    means = np.bincount(place, log_y) / counts
    (log_a,), (b,), (e,) = _fit(log_x, means[None], form)
    fitted = _log_law(log_x, log_a, b, e)

    freedom, run_freedom = len(levels) - PARAMETERS[form], len(losses) - len(levels)
    level_variance = float(((means - fitted) ** 2).sum() / freedom)
    run_variance = float(((log_y - means[place]) ** 2).sum() / run_freedom) if run_freedom else 0.0

    random = np.random.default_rng([seed, 0])
    run = run_variance * max(run_freedom, 1) / random.chisquare(max(run_freedom, 1), bootstrap)
    level = np.maximum(
        level_variance * freedom / random.chisquare(freedom, bootstrap), run / _harmonic_mean(tuple(counts))
    )
    drawn_SL = fitted + random.standard_normal((bootstrap, len(levels))) * np.sqrt(level)[:, None]
    sampled = dict(zip(("log_a", "b", "e"), _fit(log_x, drawn_SL, form), strict=True))
    coefficients = {"a": _exp(sampled["log_a"]), "b": sampled["b"]}
    if form == "irreducible":
        coefficients["e"] = sampled["e"]
    return PowerLaw(
        form=form,
        a=float(_exp(log_a)),
        b=float(b),
        e=float(e),
        r_squared=_r_squared(means, fitted),
        r_squared_runs=_r_squared(log_y, fitted[place]),
        intervals={name: tuple(map(float, np.quantile(sample, _tails()))) for name, sample in coefficients.items()},  # type: ignore[misc]
        levels=tuple(map(float, levels)),
        runs=tuple(map(int, counts)),
        level_error=math.sqrt(level_variance),
        run_error=math.sqrt(run_variance),
        seed=seed,
        _samples=sampled | {"level": level, "run": run},
    )


def _checked(x: ArrayLike, y: ArrayLike) -> tuple[Array, Array]:
    arrays = []
    for name, values in (("x", x), ("y", y)):
        array = np.asarray(values, dtype=np.float64)
        if array.ndim != 1:
            raise ValueError(f"{name} must be a list of numbers, got shape {list(array.shape)}")
        bad = ~(np.isfinite(array) & (array > 0))
        if bad.any():
            where = int(bad.argmax())
            raise ValueError(f"{name} must be positive and finite, got {name}[{where}] = {array[where]}")
        arrays.append(array)
    if len(arrays[0]) != len(arrays[1]):
        raise ValueError(f"x and y must be of the same length, got {len(arrays[0])} and {len(arrays[1])}")
    return arrays[0], arrays[1]


def _log(x: ArrayLike) -> Array:
    array = np.asarray(x, dtype=np.float64)
    if not (np.isfinite(array) & (array > 0)).all():
        raise ValueError(f"x must be positive and finite, got {x!r}")
    return np.log(array)


def _exp(x: Array) -> Array:
    return np.exp(np.clip(x, -_LARGEST_LOG, _LARGEST_LOG))


def _log_law(log_x: Array, log_a: Array | float, b: Array | float, e: Array | float) -> Array:
    power = log_a - b * log_x
    with np.errstate(divide="ignore"):  # log 0 = -inf: no irreducible loss
        return np.logaddexp(power, np.log(e))


def _fit(log_x: Array, log_y_SL: Array, form: Form) -> tuple[Array, Array, Array]:
    """log a, b and e of every sample."""
    middle = log_x.mean()
    centred = log_x - middle  # computes are large numbers, whose powers would not be
    if form == "power":
        mean_S = log_y_SL.mean(1)
        b = -(log_y_SL @ centred) / (centred @ centred)
        return mean_S + b * middle, b, np.zeros_like(b)
    b, at_middle, e = _fit_irreducible(centred, log_y_SL)
    return np.log(at_middle) + b * middle, b, e


def _fit_irreducible(centred: Array, log_y_SL: Array) -> tuple[Array, Array, Array]:
    """b, a (at the middle) and e that make the sum of squared relative errors least. Given b, they are linear in a and
    e, so that b alone is searched for: on a grid, which is then drawn together around the best of it."""
    y_SL = _exp(log_y_SL)
    grid_SG = np.broadcast_to(np.log(_EXPONENTS), (len(y_SL), len(_EXPONENTS)))
    rows = np.arange(len(y_SL))
    for zoom in range(_ZOOMS):
        a_SG, e_SG, error_SG = _linear_part(np.exp(grid_SG), centred, y_SL)
        best_S = error_SG.argmin(1)
        log_b = grid_SG[rows, best_S]
        best = np.exp(log_b), a_SG[rows, best_S], e_SG[rows, best_S]
        width = (math.log(_EXPONENTS[1]) - math.log(_EXPONENTS[0])) * (2 / 10) ** zoom
        grid_SG = log_b[:, None] + width * np.linspace(-1, 1, 11)
    return best


def _linear_part(b_SG: Array, centred: Array, y_SL: Array) -> tuple[Array, Array, Array]:
    """a and e, not negative, for every b, and the sum of the squared relative errors."""
    power_SGL = np.exp(-b_SG[..., None] * centred) / y_SL[:, None]  # both columns are divided by y: relative errors
    inverse_SL = 1 / y_SL
    pp = (power_SGL**2).sum(-1)
    p1 = np.einsum("sgl,sl->sg", power_SGL, inverse_SL)
    ii = (inverse_SL**2).sum(-1)[:, None]
    p, i = power_SGL.sum(-1), inverse_SL.sum(-1)[:, None]
    determinant = np.maximum(pp * ii - p1**2, 1e-300)
    e = np.clip((pp * i - p1 * p) / determinant, 0.0, None)
    a = (p - e * p1) / pp
    # Losses that rise with compute have no such law: a would be negative.
    e, a = np.where(a > 0, e, 0.0), np.where(a > 0, a, p / pp)
    error = ((a[..., None] * power_SGL + e[..., None] * inverse_SL[:, None] - 1) ** 2).sum(-1)
    return a, e, error


def _r_squared(log_y: Array, fitted: Array) -> float:
    rest, total = float(((log_y - fitted) ** 2).sum()), float(((log_y - log_y.mean()) ** 2).sum())
    return 1.0 - rest / total if total > 0 else float(rest == 0)


def _harmonic_mean(counts: tuple[int, ...]) -> float:
    return len(counts) / sum(1 / count for count in counts)


def _in_math(value: float) -> str:
    if 0.01 <= value < 10_000:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa} $\\cdot 10^{{{int(exponent)}}}$"


def _tails() -> list[float]:
    return [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
