"""A run is a folder: its configuration, checkpoints, model, metrics and results. `folder.Run` knows where they are."""

from sdm.run.folder import Run

__all__ = ["Run"]
