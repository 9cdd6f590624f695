"""Named scores with intervals: what metrics report."""

from __future__ import annotations

from typing import Any, NamedTuple

QUANTILE_95 = 1.96


class Score(NamedTuple):
    """A value and the limits of its 95 % interval; None where a metric gives no interval."""

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, value: float, error: float) -> Score:
        """Make a score from its standard error."""
        return cls(value, value - QUANTILE_95 * error, value + QUANTILE_95 * error)


def scores_of(name: str, metric: Any) -> dict[str, Score]:
    """Return a metric's ``scores()``; without that method, what ``compute`` returns: a number or a dict of them."""
    if hasattr(metric, "scores"):
        return metric.scores()
    values = metric.compute()
    values = values if isinstance(values, dict) else {name: values}
    return {key: Score(float(value)) for key, value in values.items()}
