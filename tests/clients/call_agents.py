"""openai-agents over /v1/responses: a tool that the package calls and answers, plain and streamed, over two turns."""

import asyncio
import sys

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

url, key = sys.argv[1:]
set_tracing_disabled(True)
asked = []


@function_tool
def get_weather(city: str) -> str:
    """The weather."""
    asked.append(city)
    return "20 degrees"


async def converse() -> None:
    async with AsyncOpenAI(base_url=url, api_key=key) as client:
        agent = Agent(
            name="guide",
            instructions="Be brief.",
            model=OpenAIResponsesModel(model="caller", openai_client=client),
            model_settings=ModelSettings(max_tokens=64, temperature=0, store=False, top_logprobs=0),
            tools=[get_weather],
        )
        first = await Runner.run(agent, "How is the weather?")
        assert (asked, first.final_output) == (["Ulm"], "It is warm."), first
        assert first.context_wrapper.usage.total_tokens > 0

        items = [*first.to_input_list(), {"role": "user", "content": "And now?"}]
        second = Runner.run_streamed(agent, items)
        kinds = [
            event.data.type async for event in second.stream_events() if event.type == "raw_response_event"
        ]
        assert kinds.count("response.completed") == 2 and "response.output_text.delta" in kinds, kinds
        assert (asked, second.final_output) == (["Ulm", "Ulm"], "It is warm."), second


asyncio.run(converse())
