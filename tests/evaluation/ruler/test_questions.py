"""Questions from files of SQuAD's and HotpotQA's format."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import ruler_oracle as oracle
from sdm.data.tokenization import ByteTokenizer
from sdm.errors import UserError
from sdm.evaluation.ruler.questions import MadeQuestions, read_hotpot, read_squad
from sdm.evaluation.ruler.sample import Generator, Sources, counter, score


def squad(articles: int = 6, paragraphs: int = 4) -> dict[str, Any]:
    """Documents and questions that the oracle can read, in SQuAD's form, with one that has no answer."""
    made = MadeQuestions(1, 0)
    data = []
    for article in range(articles):
        entries = []
        for paragraph in range(paragraphs):
            asked = made.question(article * paragraphs + paragraph)
            answer = asked.answers[0]
            entries.append(
                {
                    "context": made.document(asked.documents[0]),
                    "qas": [
                        {"question": "Who?", "answers": [], "is_impossible": True},
                        {
                            "question": asked.text,
                            "answers": [{"text": answer}, {"text": answer}, {"text": f"by {answer}"}],
                            "is_impossible": False,
                        },
                    ],
                }
            )
        data.append({"title": f"Article {article}", "paragraphs": entries})
    return {"version": "v2.0", "data": data}


def hotpot(questions: int = 10) -> list[dict[str, Any]]:
    made = MadeQuestions(2, 0)
    records = []
    for index in range(questions):
        asked = made.question(index)
        numbers = [*asked.documents, *(7 * index + step for step in range(3))]
        context = [made.document(number).split("\n") for number in numbers]
        records.append(
            {
                "question": asked.text,
                "answer": asked.answers[0],
                "context": [[title, [sentence + "." for sentence in body.split(".")[:-1]]] for title, body in context],
            }
        )
    return records


def written(folder: Path, value: Any) -> Path:
    (folder / "questions.json").write_text(json.dumps(value, indent=1))
    return folder / "questions.json"


def test_squad(tmp_path: Path) -> None:
    path = written(tmp_path, squad())
    questions = read_squad(path)
    assert (questions.num_questions, questions.num_documents) == (24, 24)
    assert questions.question(5).documents == (5,)
    assert questions.question(5).related == (4, 6, 7)
    generator = Generator(counter(ByteTokenizer()), sources=Sources(squad=path))
    for sample in generator.samples("qa_1", 8192, 6):
        assert score("part", oracle.answer(sample.prompt), sample.answers) == 1
        assert len(sample.answers) == 2
        documents = re.findall(r"^Document (\d+):$", sample.question, re.MULTILINE)
        assert documents == [str(number + 1) for number in range(len(documents))]
        # All of the same article come along before any other does.
        article = questions.question(sample.index)
        for number in (*article.documents, *article.related):
            assert questions.document(number) in sample.question
    with pytest.raises(UserError, match="has 24 questions; take at most so many samples"):
        generator.sample("qa_1", 8192, 24)


def test_hotpot(tmp_path: Path) -> None:
    path = written(tmp_path, hotpot())
    questions = read_hotpot(path)
    generator = Generator(counter(ByteTokenizer()), sources=Sources(hotpot=path))
    for sample in generator.samples("qa_2", 16384, 4):
        assert score("part", oracle.answer(sample.prompt), sample.answers) == 1
        for number in questions.question(sample.index).documents:
            assert questions.document(number) in sample.question


def test_the_place_of_the_answer_changes(tmp_path: Path) -> None:
    generator = Generator(counter(ByteTokenizer()), sources=Sources(squad=written(tmp_path, squad())))
    places = [
        sample.question.index(generator._question_set("squad").document(sample.index)) / len(sample.question)
        for sample in generator.samples("qa_1", 16384, 24)
    ]
    assert min(places) < 0.2
    assert max(places) > 0.75


def test_documents_come_again_when_there_are_no_more(tmp_path: Path) -> None:
    generator = Generator(counter(ByteTokenizer()), sources=Sources(squad=written(tmp_path, squad(1, 2))))
    sample = generator.sample("qa_1", 30_000, 0)
    asked, other = (generator._question_set("squad").document(number) for number in (0, 1))
    assert sample.question.count(asked) == 1
    assert sample.question.count(other) > 10
    assert 0.99 * 30_000 <= sample.prompt_tokens + sample.new_tokens <= 30_000


def changed(value: Any, *path: Any, to: Any) -> Any:
    value = json.loads(json.dumps(value))
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    return value


PARAGRAPH = ("data", 1, "paragraphs", 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "expected an object with 'data', a list"),
        ({"data": []}, "has no question that can be answered"),
        (changed(squad(), "data", 1, to=3), "article 2: expected an object with 'paragraphs'"),
        (changed(squad(), *PARAGRAPH, "context", to=None), "article 2, paragraph 3: expected an object with 'context'"),
        (changed(squad(), *PARAGRAPH, "qas", 1, "question", to=1), "article 2, paragraph 3, question 2: .*'question'"),
        (changed(squad(), *PARAGRAPH, "qas", 1, "answers", to=[]), "question 2: it has no answer"),
        (changed(squad(), *PARAGRAPH, "context", to="\ud800"), "article 2, paragraph 3 holds what is not text"),
    ],
)
def test_malformed_squad(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read_squad(written(tmp_path, content))
    assert "questions.json" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "expected a list of questions, got dict"),
        ([], "has no question"),
        (changed(hotpot(), 3, to="x"), "record 4: expected an object with 'context'"),
        (changed(hotpot(), 3, "context", 0, to=["title", "text"]), "record 4: expected paragraphs of the form"),
        (changed(hotpot(), 3, "answer", to=["yes"]), "record 4: expected an object with 'answer', a str"),
    ],
)
def test_malformed_hotpot(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read_hotpot(written(tmp_path, content))
    assert "questions.json" in str(caught.value)


def test_the_line_of_broken_json_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, hotpot())
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:40], "oops", *lines[40:]]))
    with pytest.raises(UserError, match=r"questions\.json, line 4[012]: it is not JSON"):
        read_hotpot(path)
