"""Facts that are the same in all of training: does a model store knowledge, and where?

A fact is (entity, relation) -> value. An entity is a pair of name tokens, and every entity has a value for every
relation. A row tells some of the facts, `name name relation value`, in random order among filler; the value is to be
predicted, and nothing in the row gives it away: it must be remembered from earlier steps. The facts are a function of
the seed, and held-out rows ask for the same ones.

Shapes: B rows, A facts of a row, S tokens of a fact with its filler.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sdm.data.batch import IGNORED, Batch, BatchSource, CurriculumRows
from sdm.data.randomness import generator_of
from sdm.errors import DataError, check_not_negative, check_size

FACT = 4  # tokens


@dataclass(frozen=True)
class FactsConfig:
    """Random facts (entity, relation) -> value, fixed for all of training and asked for among filler."""

    num_facts: int = 1024
    """Different facts."""
    num_relations: int = 8
    """Relations that every entity has a value for."""
    num_names: int = 64
    """Different name tokens; an entity is an ordered pair of them."""
    num_values: int = 64
    """Different values."""
    num_fillers: int = 32
    """Different tokens of the filler."""
    asked: int = 16
    """Facts of a row."""
    spacing: int = 6
    """Tokens of a row for each fact: four of the fact, the others filler."""
    batch_size: int = 16
    """Rows of a step, over all ranks and accumulated batches."""
    seed: int = 0
    """Decides the facts and every row."""

    @property
    def curriculum(self) -> bool:
        """Rows are alike from the first step on."""
        return False

    @property
    def num_entities(self) -> int:
        """Entities that the facts are about; the last may have fewer relations."""
        return -(-self.num_facts // self.num_relations)

    def open(self, split: str, total_steps: int | None) -> BatchSource:
        """Return the batches of a split."""
        return Facts(self, split, total_steps)

    def __post_init__(self) -> None:
        check_size(
            num_facts=self.num_facts,
            num_relations=self.num_relations,
            num_names=self.num_names,
            num_values=self.num_values,
            num_fillers=self.num_fillers,
            asked=self.asked,
            spacing=self.spacing,
            batch_size=self.batch_size,
        )
        check_not_negative(seed=self.seed)
        if self.spacing < FACT:
            raise DataError(f"spacing must be at least {FACT}, the tokens of a fact, got {self.spacing}")
        most = self.num_names**2 * self.num_relations
        if self.num_facts > most:
            raise DataError(f"num_facts must be at most num_names^2 x num_relations = {most}, got {self.num_facts}")


@dataclass(frozen=True)
class FactTable:
    """All facts: the tokens of each, its value last."""

    tokens: Tensor
    """[facts,4] int64."""


def fact_table(config: FactsConfig) -> FactTable:
    """The facts of a seed. Name tokens come first, then relations, values and fillers."""
    generator = generator_of(config.seed, "facts")
    entities = torch.randperm(config.num_names**2, generator=generator)[: config.num_entities]
    number = torch.arange(config.num_facts)
    entity = entities[number // config.num_relations]
    relation = config.num_names + number % config.num_relations
    values = torch.randint(config.num_values, (config.num_facts,), generator=generator)
    first_value = config.num_names + config.num_relations
    return FactTable(
        torch.stack((entity // config.num_names, entity % config.num_names, relation, first_value + values), -1)
    )


def fact_rows(config: FactsConfig, table: FactTable, numbers: Tensor, generator: torch.Generator) -> Batch:
    """Rows that tell the facts of `numbers` [B,A], each at a random place of its `spacing` tokens."""
    rows, asked = numbers.shape
    first_filler = config.num_names + config.num_relations + config.num_values
    ids_BAS = first_filler + torch.randint(config.num_fillers, (rows, asked, config.spacing), generator=generator)
    start = torch.randint(config.spacing - FACT + 1, (rows, asked, 1), generator=generator)
    places = start + torch.arange(FACT)
    told = table.tokens[numbers]
    ids_BAS.scatter_(2, places, told)
    targets = torch.full_like(ids_BAS, IGNORED)
    targets.scatter_(2, places[..., 2:3], told[..., 3:])  # the value follows the relation
    return Batch(ids_BAS.flatten(1), targets.flatten(1))


class Facts(CurriculumRows):
    """A `BatchSource`. Every fact comes once before any comes again."""

    config: FactsConfig

    def __init__(self, config: FactsConfig, split: str = "train", total_steps: int | None = None) -> None:
        super().__init__(config, split, total_steps)
        self.table = fact_table(config)

    @property
    def sequence_length(self) -> int:
        """Tokens of a row."""
        return self.config.asked * self.config.spacing

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: token ids are below it."""
        config = self.config
        return config.num_names + config.num_relations + config.num_values + config.num_fillers

    def draw(self, step: int) -> tuple[Batch, int]:
        """Draw all rows of a step.

        Returns:
            The rows, and that each stands for itself.
        """
        config = self.config
        each = config.batch_size * config.asked
        numbers = torch.cat([self._order(place) for place in self._epochs(step * each, each)])
        start = step * each % config.num_facts
        numbers = numbers[start : start + each].view(config.batch_size, config.asked)
        generator = generator_of(config.seed, "fact rows", self.split, step)
        return fact_rows(config, self.table, numbers, generator), 1

    def _epochs(self, first: int, count: int) -> range:
        """The epochs that so many facts from a place on belong to."""
        facts = self.config.num_facts
        return range(first // facts, math.ceil((first + count) / facts))

    def _order(self, epoch: int) -> Tensor:
        """All facts in the order of an epoch."""
        generator = generator_of(self.config.seed, "fact order", self.split, epoch)
        return torch.randperm(self.config.num_facts, generator=generator)
