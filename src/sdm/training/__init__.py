"""Training: from a typed configuration (`sdm.run.config`) to a run's folder that can be resumed and exported."""

from sdm.training.trainer import Trainer

__all__ = ["Trainer"]
