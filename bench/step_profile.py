"""What a decode step consists of, in milliseconds: the engine as it is, its functions timed in place."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import slora.models.weights.linear
import slora.runner.runner
from bench.step_clock import REST, StepClock, Timed
from bench.stepped_engine import SteppedEngine
from bench.table import Row
from bench.workload import prompts
from slora.core.messages import Outputs
from slora.models.decoder import Decoder
from slora.models.step_batch import StepBatch
from slora.runner.runner import Runner
from slora.scheduler.scheduler import Scheduler
from slora_adapters.process.wire import encode
from slora_kernels.kernel_selector import kernel_class

BASE, HEAD, ATTENTION, ELEMENTWISE = "base matmuls", "head", "attention", "elementwise"
SHRINK, EXPAND, MODEL = "LoRA shrink", "LoRA expand", "rest of the model"
SCHEDULE, BUILD, SAMPLE, MESSAGES = "schedule", "build batch", "sample", "messages"
PARTS = (BASE, HEAD, ATTENTION, ELEMENTWISE, SHRINK, EXPAND, MODEL, SCHEDULE, BUILD, SAMPLE, MESSAGES, REST)
# All that is neither arithmetic nor attention.
OVERHEAD = (SCHEDULE, BUILD, SAMPLE, MESSAGES, REST)

_KERNELS = {
    "attend": ATTENTION,
    "rms_norm": ELEMENTWISE,
    "add_rms_norm": ELEMENTWISE,
    "act_mul": ELEMENTWISE,
    "rotate_and_write_kv": ELEMENTWISE,
    "quantized_linear": BASE,
    "coded_linear": BASE,
    "shrink": SHRINK,
    "shrink_embedding": SHRINK,
    "expand": EXPAND,
    "prepare_attention": BUILD,
    "prepare_lora": BUILD,
}


@dataclass(frozen=True, slots=True)
class Scene:
    """Requests that all decode, each with an adapter (by number, in turn) or, with none, on the base."""

    num_adapters: int
    requests: int
    input_tokens: int


def profile_rows(stepped: SteppedEngine, scenes: Sequence[Scene], num_steps: int, rounds: int) -> list[Row]:
    """A row of each scene; the rounds of all are interleaved, after one that warms up."""
    clocks = [StepClock() for _ in scenes]
    for number in range(rounds + 1):
        for scene, clock in zip(scenes, clocks, strict=True):
            steps = time_decode(stepped, scene, num_steps).steps
            clock.steps += steps if number else []
    return [_row(scene, clock) for scene, clock in zip(scenes, clocks, strict=True)]


def time_decode(stepped: SteppedEngine, scene: Scene, num_steps: int) -> StepClock:
    """The clock of `num_steps` steps in which all requests decode, their adapters in the pool."""
    asked = prompts(scene.requests, scene.input_tokens, stepped.engine.info.vocab_size)
    given = [(i % scene.num_adapters,) if scene.num_adapters else () for i in range(scene.requests)]
    stepped.add(asked, given, 1)
    stepped.finish()
    # Those who begin first go on until the last has begun.
    stepped.add(asked, given, num_steps + scene.requests)
    while len(stepped.step()) < scene.requests:
        if not stepped.engine.num_unfinished:
            raise RuntimeError(f"{scene.requests} requests never ran in one step; give the pool more memory")
    clock = StepClock()
    with clock.timing(timed_functions(stepped.engine.info.kernels)):
        for _ in range(num_steps):
            with clock.step():
                outputs = stepped.step()
                with clock.part(MESSAGES):
                    encode(Outputs([output.to_row(output.request_id) for output in outputs]).pack())
    stepped.drop()
    return clock


def timed_functions(kernels: str) -> list[Timed]:
    """kernels: the engine's, by name."""
    owner = kernel_class(kernels)
    return [
        *(Timed(owner, name, part) for name, part in _KERNELS.items()),
        Timed(slora.models.weights.linear, "multiply", BASE),
        Timed(slora.runner.runner, "sample", SAMPLE),
        Timed(Decoder, "forward", MODEL),
        Timed(Decoder, "logits", HEAD, is_whole=True),
        Timed(Scheduler, "schedule", SCHEDULE),
        Timed(Scheduler, "postprocess", SCHEDULE),
        Timed(StepBatch, "build", BUILD),
        Timed(Runner, "_transfer_pages", BUILD),
    ]


def _row(scene: Scene, clock: StepClock) -> Row:
    """Medians over the steps, in milliseconds; the overhead is its share of its own step."""
    parts = {part: 1e3 * statistics.median(step.get(part, 0.0) for step in clock.steps) for part in PARTS}
    whole = 1e3 * statistics.median(sum(step.values()) for step in clock.steps)
    shares = [sum(step.get(part, 0.0) for part in OVERHEAD) / sum(step.values()) for step in clock.steps]
    return {
        "batch": scene.requests,
        "adapters": scene.num_adapters,
        "step ms": whole,
        **parts,
        "overhead %": 100 * statistics.median(shares),
    }
