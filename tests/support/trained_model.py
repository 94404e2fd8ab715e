"""The trained demo model's answers to unseen sentences, with and without an adapter."""

from dataclasses import dataclass
from pathlib import Path

from demo.toy.tasks import TASKS, unseen_sentences
from slora import LLM, SamplingParams
from tests.support.cpu_kernels import KERNELS

DEMO = Path(__file__).parents[2] / "demo"


@dataclass(frozen=True, slots=True)
class Figures:
    """nats: mean loss per token, from the log-probabilities of the model's own answers."""

    right: int
    asked: int
    nats: float


def ask_trained_model(num_sentences: int, **settings: str) -> Figures:
    """settings: settings of `LLM`. Each sentence is asked twice."""
    sentences = unseen_sentences(num_sentences)
    tasks = {None: "echo", DEMO / "adapters" / "reverse": "reverse"}
    asked = [(sentence, adapter) for adapter in tasks for sentence in sentences]
    chats = [[{"role": "user", "content": sentence}] for sentence, _ in asked]
    params = SamplingParams(max_tokens=160, temperature=0.0, logprobs=0)
    llm = LLM(DEMO / "model", pool_bytes=64 << 20, kernels=KERNELS, **settings)
    outputs = llm.chat(chats, params, [adapter for _, adapter in asked])
    right = sum(
        output.text == TASKS[tasks[adapter]].apply(sentence)
        for output, (sentence, adapter) in zip(outputs, asked, strict=True)
    )
    lost = -sum(entry.logprob for output in outputs for entry in output.logprobs or ())
    return Figures(right, len(asked), lost / sum(len(output.token_ids) for output in outputs))
