"""transformers, with adapters peft's `adapter_names`, in its best case: one batch of equal lengths, no paging."""

import peft
import torch
import transformers

import bench.contenders.answering as answering


class PeftBatch:
    def __init__(self, setup: answering.Setup) -> None:
        torch.set_num_threads(setup.threads)
        self.version = f"transformers {transformers.__version__}, peft {peft.__version__}"
        dtype = getattr(torch, setup.dtype)
        model = transformers.AutoModelForCausalLM.from_pretrained(setup.model, dtype=dtype).eval()
        for index, path in enumerate(setup.adapters):
            if index == 0:
                model = peft.PeftModel.from_pretrained(model, path, adapter_name="a0")
            else:
                model.load_adapter(path, adapter_name=f"a{index}")
        self._model = model.eval()

    def generate(self, run: answering.Run) -> int:
        asked = torch.tensor(run.prompts)
        given = [index for index in run.adapters if index is not None]
        chosen = {"adapter_names": [f"a{index}" for index in given]} if given else {}
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=asked,
                attention_mask=torch.ones_like(asked),
                max_new_tokens=run.output_tokens,
                min_new_tokens=run.output_tokens,
                do_sample=False,
                **chosen,
            )
        return int((out.shape[1] - asked.shape[1]) * out.shape[0])


if __name__ == "__main__":
    answering.answer(PeftBatch)
