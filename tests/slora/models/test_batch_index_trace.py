import torch

from slora.models.model_traces import BatchIndexTrace

NUM_TOKENS = 13


def test_arithmetic_carries_the_index_and_selection_does_not() -> None:
    hidden, positions = torch.ones(NUM_TOKENS, 4), torch.arange(NUM_TOKENS)
    trace = BatchIndexTrace(NUM_TOKENS)
    with trace:
        index = torch.arange(NUM_TOKENS)
        scaled = hidden * torch.log1p(index[:, None].float())
        learned = torch.nn.functional.embedding(index, torch.ones(20, 4))
        routed = hidden[index.flip(0)]
        gathered = hidden.index_select(0, index)
        rotated = hidden * positions[:, None].cos()
        other = torch.arange(NUM_TOKENS + 1)
        written = torch.zeros(NUM_TOKENS, 4)
        written += scaled
    assert all(map(trace.is_traced, (index, scaled, learned, written)))
    assert not any(map(trace.is_traced, (routed, gathered, rotated, other, hidden)))
