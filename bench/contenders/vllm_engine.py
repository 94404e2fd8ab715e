"""vLLM on a CPU: compiled, its threads bound, and as many adapter slots as one batch can use."""

import os

import torch

if "AMX" not in os.environ.get("ONEDNN_MAX_CPU_ISA", "AMX"):
    # What vLLM multiplies without oneDNN asks torch, which says what the CPU has.
    torch.cpu._is_amx_tile_supported = lambda: False

# isort: split
import vllm
from vllm.lora.request import LoRARequest

import bench.contenders.answering as answering

_MAX_RANK = 64


class VllmEngine:
    def __init__(self, setup: answering.Setup) -> None:
        self.version = f"vllm {vllm.__version__}"
        self._paths = setup.adapters
        lora = {}
        if setup.adapters:
            lora = {
                "enable_lora": True,
                "max_lora_rank": _MAX_RANK,
                "max_loras": min(len(setup.adapters), setup.max_batch),
                "max_cpu_loras": len(setup.adapters),
            }
        self._llm = vllm.LLM(
            setup.model,
            dtype=setup.dtype,
            skip_tokenizer_init=True,
            max_model_len=setup.max_model_len,
            max_num_seqs=setup.max_batch,
            enable_prefix_caching=False,
            disable_log_stats=True,
            **lora,
        )

    def generate(self, run: answering.Run) -> int:
        params = vllm.SamplingParams(
            max_tokens=run.output_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt} for prompt in run.prompts]
        given = [self._request(index) for index in run.adapters]
        outputs = self._llm.generate(
            asked, params, use_tqdm=False, lora_request=given if any(given) else None
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def _request(self, index: int | None) -> LoRARequest | None:
        return None if index is None else LoRARequest(f"a{index}", index + 1, self._paths[index])


if __name__ == "__main__":
    answering.answer(VllmEngine)
