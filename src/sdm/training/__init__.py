"""Training: from a typed configuration to a run's folder that can be continued, exported and trusted."""

from sdm.models.model_config import ModelConfig
from sdm.run.config import (
    CheckpointConfig,
    ComputeConfig,
    GuardConfig,
    MonitorConfig,
    OptimConfig,
    ScheduleConfig,
    TrainConfig,
)
from sdm.run.errors import TrainingError, TrainingStopped
from sdm.run.mesh import MeshConfig
from sdm.training.trainer import Trainer

__all__ = [
    "CheckpointConfig",
    "ComputeConfig",
    "GuardConfig",
    "MeshConfig",
    "ModelConfig",
    "MonitorConfig",
    "OptimConfig",
    "ScheduleConfig",
    "TrainConfig",
    "Trainer",
    "TrainingError",
    "TrainingStopped",
]
