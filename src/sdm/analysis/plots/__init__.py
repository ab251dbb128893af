"""The paper's figures, each from plain numbers: a file per family, `style.py` for what they share."""

from sdm.analysis.plots.ablation import differences_figure, slots_figure, write_read_figure
from sdm.analysis.plots.access import cumulative_mass_figure, effective_keys_figure
from sdm.analysis.plots.cost import cost_figure, costs_figure
from sdm.analysis.plots.loss import loss_figure
from sdm.analysis.plots.position import gain_figure, initial_state_figure, position_figure, position_points
from sdm.analysis.plots.recall import recall_figure, state_recall_figure
from sdm.analysis.plots.scaling import scaling_figure
from sdm.analysis.plots.state import state_vs_flops
from sdm.analysis.plots.style import COLORS, save, styles
from sdm.analysis.plots.utilisation import utilisation_figure
from sdm.evaluation.report import Point

__all__ = [
    "COLORS",
    "Point",
    "cost_figure",
    "costs_figure",
    "cumulative_mass_figure",
    "differences_figure",
    "effective_keys_figure",
    "gain_figure",
    "initial_state_figure",
    "loss_figure",
    "position_figure",
    "position_points",
    "recall_figure",
    "save",
    "scaling_figure",
    "slots_figure",
    "state_recall_figure",
    "state_vs_flops",
    "styles",
    "utilisation_figure",
    "write_read_figure",
]
