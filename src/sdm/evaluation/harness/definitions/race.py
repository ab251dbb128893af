"""The functions that the harness's own task of RACE is made of."""

from lm_eval.tasks.race.preprocess_race import doc_to_choice, doc_to_target, doc_to_text

__all__ = ["doc_to_choice", "doc_to_target", "doc_to_text"]
