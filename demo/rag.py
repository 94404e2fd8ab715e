"""Questions about documents (RAG): embeddings of slora, vectors in Milvus, answers of a tenant's adapter.

    pip install openai "pymilvus[milvus-lite]"
    python demo/rag.py --key slora_...          # the key of the demo's tenant `answers`, which `make serve` printed

The program embeds 125 passages and finds those that belong to a question, by their vectors (Milvus Lite), by their
words (BM25 of SQLite's FTS5), and by both ranks together. It counts how often the right passage is among the first
five for 100 questions. Then it answers some questions from what it has found. It does not import slora.
"""

import argparse
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from openai import OpenAI
from pymilvus import MilvusClient

TOP = 5
COLLECTION = "passages"
# Both ranks count, and a first place in one of them most (reciprocal rank fusion, Cormack et al. 2009).
RANK_CONSTANT = 60
PRODUCTS = (
    "Aurora kettle", "Basalt grill", "Cedar desk", "Delta bicycle", "Ember stove", "Fjord tent", "Grove chair",
    "Halo lamp", "Iris camera", "Juniper bed", "Kestrel drone", "Lotus teapot", "Marlin kayak", "Nimbus jacket",
    "Onyx watch", "Pebble speaker", "Quartz clock", "Raven backpack", "Sable boots", "Tundra freezer", "Umber oven",
    "Violet scarf", "Willow basket", "Xenon torch", "Yarrow blanket",
)  # fmt: skip
# The questions about the last products are only examples of questions.
NUM_ASKED = 100
# Passage and question of each topic. A question shares few words with its passage, apart from the product.
TOPICS = (
    ("The {product} is covered for {years} years after the purchase. Keep the receipt, because the repair is free "
     "only with it.", "How long is the guarantee on the {product}?"),
    ("Wipe the {product} with a soft, damp cloth once in {weeks} weeks. Strong cleaners leave stains on its surface.",
     "What should I do when my {product} is dirty?"),
    ("A new {product} sells for {euros} euros in our shops. Students and pensioners pay a tenth less.",
     "What does the {product} cost?"),
    ("The workshop in {city} has built every {product} since the beginning, most of it by hand.",
     "Where is the {product} made?"),
    ("We send the {product} by lorry. It is at your door within {days} days, and the driver calls an hour before.",
     "When will the {product} arrive if I order it today?"),
)  # fmt: skip
CITIES = ("Porto", "Ghent", "Bergen", "Turin", "Krakow", "Malmo", "Riga", "Seville", "Nantes", "Bristol")


@dataclass(frozen=True)
class Passage:
    """A passage and the question that it answers."""

    text: str
    question: str


def make_passages() -> Iterator[Passage]:
    for number, product in enumerate(PRODUCTS):
        values = {
            "product": product,
            "years": 2 + number % 9,
            "weeks": 1 + number % 7,
            "euros": 49 + 30 * number,
            "city": CITIES[number % len(CITIES)],
            "days": 3 + number % 11,
        }
        for text, question in TOPICS:
            yield Passage(text.format(**values), question.format(**values))


class PassageIndex:
    """The passages of one tenant: their vectors in Milvus Lite, and their words in SQLite."""

    def __init__(self, client: OpenAI, path: Path, passages: Sequence[str], examples: Sequence[str]) -> None:
        """examples: some questions. The vectors of a language model that was not trained for retrieval all lie close to
        their mean, and questions have another mean than passages. Without the means, they can be compared.
        """
        self._client = client
        # The base model embeds. The adapter was trained to answer.
        self._model = next(
            one.id for one in client.models.list() if one.id and not getattr(one, "parent", None)
        )
        self._milvus = MilvusClient(str(path))
        self._words = sqlite3.connect(":memory:")
        self._mean = mean(self._embed(examples))
        vectors = self._embed(passages)
        middle = mean(vectors)
        vectors = [subtract(vector, middle) for vector in vectors]
        self._milvus.create_collection(COLLECTION, dimension=len(vectors[0]), metric_type="COSINE")
        self._milvus.insert(COLLECTION, [{"id": at, "vector": vector} for at, vector in enumerate(vectors)])
        self._words.execute("CREATE VIRTUAL TABLE words USING fts5(text, tokenize='porter')")
        self._words.executemany("INSERT INTO words(rowid, text) VALUES (?, ?)", enumerate(passages))

    def embed_questions(self, questions: Sequence[str]) -> list[list[float]]:
        return [subtract(vector, self._mean) for vector in self._embed(questions)]

    def _embed(self, texts: Sequence[str]) -> list[list[float]]:
        answer = self._client.embeddings.create(model=self._model, input=list(texts), encoding_format="float")
        return [one.embedding for one in answer.data]

    def find_by_vector(self, vector: list[float], count: int) -> list[int]:
        (hits,) = self._milvus.search(COLLECTION, [vector], limit=count)
        return [hit["id"] for hit in hits]

    def find_by_words(self, question: str, count: int) -> list[int]:
        words = "".join(letter if letter.isalnum() else " " for letter in question).split()
        rows = self._words.execute(
            "SELECT rowid FROM words WHERE words MATCH ? ORDER BY bm25(words) LIMIT ?",
            (" OR ".join(f'"{word}"' for word in words), count),
        )
        return [number for (number,) in rows]

    def find(self, question: str, vector: list[float], count: int = TOP) -> list[int]:
        """Returns the passages with the best ranks by vector and by words together."""
        scores: dict[int, float] = {}
        for ranked in (self.find_by_vector(vector, 4 * count), self.find_by_words(question, 4 * count)):
            for rank, number in enumerate(ranked, start=1):
                scores[number] = scores.get(number, 0.0) + 1 / (RANK_CONSTANT + rank)
        return sorted(scores, key=lambda number: -scores[number])[:count]


def mean(vectors: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(vectors) for column in zip(*vectors, strict=True)]


def subtract(vector: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(vector, other, strict=True)]


def answer(client: OpenAI, passages: Sequence[str], question: str) -> tuple[str, float, int, int]:
    """Returns the answer, its time in seconds, and the tokens of the prompt: all, and those of the prefix cache."""
    context = "\n".join(passages)
    begun = time.perf_counter()
    completed = client.chat.completions.create(
        model="default",
        messages=[
            {"role": "system", "content": f"Answer in one short sentence, only from these facts:\n{context}"},
            {"role": "user", "content": question},
        ],
        temperature=0,
        max_tokens=60,
    )
    usage = completed.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens or 0
    return (
        completed.choices[0].message.content or "",
        time.perf_counter() - begun,
        usage.prompt_tokens,
        cached,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server")
    parser.add_argument("--key", required=True, help="an API key")
    options = parser.parse_args()
    client = OpenAI(base_url=options.url + "/v1", api_key=options.key)
    passages = list(make_passages())
    texts, questions = [one.text for one in passages], [one.question for one in passages]
    with tempfile.TemporaryDirectory() as folder:
        index = PassageIndex(client, Path(folder) / "passages.db", texts, questions[NUM_ASKED:])
        show(client, index, texts, questions[:NUM_ASKED])


def show(client: OpenAI, index: PassageIndex, texts: Sequence[str], questions: Sequence[str]) -> None:
    """Prints the recall, then some answers. Question N belongs to passage N."""
    vectors = index.embed_questions(questions)
    found = {"vectors": 0, "words (BM25)": 0, "both": 0}
    for right, (question, vector) in enumerate(zip(questions, vectors, strict=True)):
        found["vectors"] += right in index.find_by_vector(vector, TOP)
        found["words (BM25)"] += right in index.find_by_words(question, TOP)
        found["both"] += right in index.find(question, vector)
    for name, count in found.items():
        print(f"recall at {TOP} by {name}: {count / len(questions):.2f}")
    for right in (0, 7, 43):
        best = index.find(questions[right], vectors[right])
        # The same passages in the same order are the same prefix of the prompt, which is computed once.
        passages = [texts[number] for number in best]
        for asked in (questions[right], questions[right] + " Please answer politely."):
            text, seconds, tokens, cached = answer(client, passages, asked)
            print(f"\n{asked}\n  {text.strip()}")
            print(f"  {seconds:.2f} s; {cached} of {tokens} tokens of the prompt came from the prefix cache")


if __name__ == "__main__":
    main()
