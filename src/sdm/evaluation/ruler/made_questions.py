"""Questions made from templates, about made-up documents: for machines that have no files of questions."""

from __future__ import annotations

import random
from collections.abc import Sequence

from sdm.data.randomness import hash_of
from sdm.evaluation.ruler.questions import Question
from sdm.evaluation.ruler.words import word_lists

_BUILDINGS = ("museum", "library", "theatre", "observatory", "school", "hospital", "bakery", "brewery", "lighthouse")
_TRADES = ("baker", "weaver", "sailor", "teacher", "painter", "farmer", "doctor", "miller", "printer", "tailor")
_STARTS = ("Al", "Bel", "Cor", "Dar", "El", "Fen", "Gal", "Har", "Is", "Jor", "Kel", "Lor", "Mar", "Nor", "Or", "Per")
_MIDDLES = ("a", "an", "ar", "e", "en", "i", "in", "o", "on", "u")
_NAME_ENDS = ("bert", "dan", "dor", "fred", "lia", "lin", "mar", "mund", "na", "ric", "sa", "ton", "vin", "wen")
_TOWN_ENDS = ("bridge", "bury", "dale", "field", "ford", "ham", "holm", "mouth", "port", "stead", "wick", "worth")


def _name(number: int, ends: Sequence[str]) -> str:
    number, end = divmod(number, len(ends))
    start, middle = divmod(number, len(_MIDDLES))
    return f"{_STARTS[start]}{_MIDDLES[middle]}{ends[end]}"


_FIRST, _TOWNS = len(_STARTS) * len(_MIDDLES) * len(_NAME_ENDS), len(_STARTS) * len(_MIDDLES) * len(_TOWN_ENDS)


class MadeQuestions:
    """Questions from templates, of one hop or two, about as many made-up documents as a sample needs.

    Document 2k is about the k-th building, document 2k + 1 about its founder. One hop asks for the founder, two for the
    town where the founder was born. Every person and every building has one document, so every question one answer.
    """

    num_questions, num_documents = 2**31, 2**21

    def __init__(self, hops: int, seed: int) -> None:
        self.hops, self._seed = hops, seed

    def question(self, index: int) -> Question:
        rng = random.Random(hash_of("made question", self._seed, index))
        pair = rng.randrange(self.num_documents // 2)
        building, founder, _, born = self._facts(pair)
        if self.hops == 1:
            return Question(f"Who founded {building}?", (founder,), (2 * pair,))
        asked = f"In which town was the founder of {building} born?"
        return Question(asked, (born,), (2 * pair, 2 * pair + 1))

    def document(self, number: int) -> str:
        pair, about_person = divmod(number, 2)
        building, founder, town, born = self._facts(pair)
        rng = random.Random(hash_of("made document", self._seed, number))
        adjectives, nouns = word_lists()["adjectives"], word_lists()["nouns"]
        year, trade = rng.randrange(1650, 1900), rng.choice(_TRADES)
        if about_person:
            facts = [
                f"{founder} was a {trade} who was born in {born} in {year}.",
                f"In {year + rng.randrange(20, 50)} {founder} moved to {town} and bought a {rng.choice(nouns)} there.",
            ]
            title = founder
        else:
            facts = [
                f"{_capital(building)} was founded by {founder} in {year + 40}.",
                f"It stands beside the {rng.choice(adjectives)} {rng.choice(nouns)} of {town}.",
            ]
            title = _capital(building)
        for _ in range(rng.randrange(4, 12)):
            facts.append(
                f"{rng.choice(('Visitors', 'Neighbours', 'Travellers', 'Historians'))} "
                f"{rng.choice(('remember', 'mention', 'describe', 'admire'))} the {rng.choice(adjectives)} "
                f"{rng.choice(nouns)} and the {rng.choice(adjectives)} {rng.choice(nouns)}."
            )
        return f"{title}\n{' '.join(facts)}"

    def _facts(self, pair: int) -> tuple[str, str, str, str]:
        """The building, its founder, its town, and where the founder was born. The pair decides its names."""
        rng = random.Random(hash_of("made facts", self._seed, pair))
        adjectives, nouns = word_lists()["adjectives"], word_lists()["nouns"]
        town, born = (_name(number, _TOWN_ENDS) for number in rng.sample(range(_TOWNS), 2))
        # Two names and a number of the house tell a million of each apart.
        family, first = divmod(pair, _FIRST)
        founder = f"{_name(first, _NAME_ENDS)} {_capital(nouns[family])}"
        building = f"the {rng.choice(adjectives)} {rng.choice(_BUILDINGS)} No. {pair + 1} of {town}"
        return building, founder, town, born


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
