// @anthropic-ai/sdk, with its key header alone: a tool of a tenant's adapter that is called and answered, plain and
// streamed.
import assert from "node:assert";
import Anthropic from "@anthropic-ai/sdk";

const [url, apiKey] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url.replace(/\/v1$/, ""), apiKey });
const tools = [
  { name: "get_weather", input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } },
];
const options = { model: "caller", max_tokens: 1000, tools };
const messages = [{ role: "user", content: "How is the weather?" }];

function answerOf(message) {
  const call = message.content.find((block) => block.type === "tool_use");
  assert.deepEqual([message.stop_reason, call.name, call.input], ["tool_use", "get_weather", { city: "Ulm" }]);
  const result = { type: "tool_result", tool_use_id: call.id, content: "20 degrees" };
  return [...messages, { role: "assistant", content: message.content }, { role: "user", content: [result] }];
}

const first = await client.messages.create({ ...options, messages });
const last = await client.messages.create({ ...options, messages: answerOf(first) });
assert.deepEqual([last.content[0].text, last.stop_reason], ["It is warm.", "end_turn"]);

const whole = await client.messages.stream({ ...options, messages }).finalMessage();
const stream = client.messages.stream({ ...options, messages: answerOf(whole) });
let text = "";
stream.on("text", (part) => (text += part));
await stream.finalMessage();
assert.equal(text, "It is warm.");

const beta = await client.beta.messages.countTokens({ model: "caller", messages, betas: ["token-counting-2024-11-01"] });
assert.ok(beta.input_tokens > 0);
await assert.rejects(client.messages.create({ ...options, messages, model: "nope" }), Anthropic.NotFoundError);
