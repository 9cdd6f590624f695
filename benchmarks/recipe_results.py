"""Costs and losses of options as a table and figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common import Report
from recipe_cost import Cost
from recipe_effect import BASE, Difference, difference
from step_clock import Seconds, median, ratio, ratios

COST_HEADINGS = ["ms per step", "over the experiment's", "parameters", "FLOPs"]
PEAK_HEADINGS = ["peak, GB"]
LOSS_HEADINGS = ["loss", "difference"]


@dataclass(frozen=True)
class Results:
    """Measurements by option name; options that were not measured are absent."""

    costs: Mapping[str, tuple[Cost, Cost]]
    """Costs of the experiment and with the option, measured alternately."""
    losses: Mapping[str, Sequence[float]]
    """Held-out loss of each seed; under ``BASE``, the experiment's."""

    @property
    def base_seconds(self) -> list[Seconds]:
        """Times of the experiment's steps from the comparisons with all options."""
        return [turn for base, _ in self.costs.values() for turn in base.seconds]

    @property
    def has_peak(self) -> bool:
        """Whether memory was measured."""
        return any(base.peak is not None for base, _ in self.costs.values())

    def difference(self, name: str) -> Difference | None:
        """Difference of the loss with an option from the experiment's; negative is better."""
        return difference(self.losses[name], self.losses[BASE]) if name in self.losses else None

    def report(self, title: str, names: Sequence[str]) -> Report:
        """Make a table with a row for the experiment, then one per option, in order."""
        headings = [""]
        if self.costs:
            headings += COST_HEADINGS + (PEAK_HEADINGS if self.has_peak else [])
        if self.losses:
            headings += LOSS_HEADINGS
        report = Report(title, headings)
        report.row("the experiment", *self._base_cells(report.figures))
        for name in names:
            if name in self.costs or name in self.losses:
                report.row(name, *self._cells(name, report.figures))
        self._notes(report)
        return report

    def _base_cells(self, figures: dict[str, float]) -> list[str]:
        cells = []
        if self.costs:
            base = next(iter(self.costs.values()))[0]
            seconds = median(self.base_seconds)
            figures |= {"seconds": seconds, "parameters": base.num_parameters, "flops_a_sample": base.flops}
            cells += [f"{1000 * seconds:.1f}", "", f"{base.num_parameters / 1e6:.3f} M", f"{base.flops / 1e9:.3f} G"]
            if base.peak is not None:
                figures["peak_gb"] = base.peak / 1e9
                cells.append(f"{base.peak / 1e9:.2f}")
        if self.losses:
            loss = statistics.fmean(self.losses[BASE])
            figures["loss"] = loss
            cells += [f"{loss:.4f}", ""]
        return cells

    def _cells(self, name: str, figures: dict[str, float]) -> list[str]:
        cells = []
        if self.costs:
            cells += self._cost_cells(name, figures)
        if self.losses:
            cells += self._loss_cells(name, figures)
        return cells

    def _cost_cells(self, name: str, figures: dict[str, float]) -> list[str]:
        if name not in self.costs:
            return [""] * (len(COST_HEADINGS) + self.has_peak)
        base, cost = self.costs[name]
        each = ratios(cost.seconds, base.seconds)
        middle = statistics.median(each)
        shown = f"{middle:.3f} ({min(each):.2f} to {max(each):.2f})"
        if not self.has_peak:  # CPU times mean little on a GPU
            of_cpu = ratio(cost.seconds, base.seconds, "cpu")
            figures[f"seconds_over_experiment_{name}_cpu_seconds"] = of_cpu
            shown += f" [{of_cpu:.3f}]"
        parameters, flops = cost.num_parameters / base.num_parameters, cost.flops / base.flops
        figures |= {
            f"seconds_over_experiment_{name}": middle,
            f"parameters_over_experiment_{name}": parameters,
            f"flops_over_experiment_{name}": flops,
        }
        cells = [f"{1000 * median(cost.seconds):.1f}", shown, f"{parameters:.3f}", f"{flops:.3f}"]
        if base.peak is not None and cost.peak is not None:
            figures |= {
                f"peak_gb_{name}": cost.peak / 1e9,
                f"peak_over_experiment_{name}": cost.peak / base.peak,
            }
            cells.append(f"{cost.peak / 1e9:.2f}")
        return cells

    def _loss_cells(self, name: str, figures: dict[str, float]) -> list[str]:
        less = self.difference(name)
        if less is None:
            return [""] * len(LOSS_HEADINGS)
        loss = statistics.fmean(self.losses[name])
        figures |= {f"loss_{name}": loss, f"loss_less_experiment_{name}": less.mean}
        shown = f"{less.mean:+.4f}"
        if less.error is not None:
            figures[f"loss_less_experiment_error_{name}"] = less.error
            shown += f" ± {less.error:.4f}"
        return [f"{loss:.4f}", shown]

    def _notes(self, report: Report) -> None:
        if self.costs:
            report.note(
                "A step consists of forward, backward, clipping, optimizer and averages on fixed data. Ratios of times "
                "are medians (lowest to highest) over rounds in which both steps alternate; on a CPU, square brackets "
                "hold the ratio of CPU times, which other processes disturb less. Parameters and FLOPs (forward and "
                "backward of a sample, without the optimizer) are also ratios to the experiment's."
            )
        if self.losses:
            report.note(
                "The loss is the unweighted held-out loss of the averaged weights at 8 fixed timesteps; a negative "
                "difference favours the option. Options that change only rounding are not trained."
            )
            num_seeds = len(self.losses[BASE])
            report.note(
                "One training each, so the share of chance in a difference is unknown (try --seeds 3)."
                if num_seeds == 1
                else f"Means of {num_seeds} seeds; ± is one standard error of differences between equal seeds."
            )
