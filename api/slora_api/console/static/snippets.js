// Requests as commands and programs. The key is an environment variable in them, never the key itself.

const address = () => new URL("v1", document.baseURI).href;

export function writeCurl(body) {
  const json = JSON.stringify({ ...body, stream: true }, null, 2);
  return [
    `curl -N ${quote(`${address()}/chat/completions`)} \\`,
    '  -H "Authorization: Bearer $SLORA_API_KEY" \\',
    '  -H "Content-Type: application/json" \\',
    `  -d ${quote(json)}`,
    "",
  ].join("\n");
}

export function writePython(body) {
  const { model, messages, top_k, min_p, repetition_penalty, adapters, ...others } = body;
  // Fields that OpenAI's API lacks. JSON drops those that are undefined.
  const extra = JSON.parse(JSON.stringify({ top_k, min_p, repetition_penalty, adapters }));
  const fields = { model, messages, ...others, ...Object.keys(extra).length > 0 && { extra_body: extra } };
  return [
    "import os",
    "",
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(address())}, api_key=os.environ["SLORA_API_KEY"])`,
    "stream = client.chat.completions.create(",
    ...Object.entries(fields).map(([name, value]) => `    ${name}=${literal(value)},`),
    "    stream=True,",
    ")",
    "for chunk in stream:",
    "    if chunk.choices:",
    '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
    ...body.tools ? [
      "        for call in chunk.choices[0].delta.tool_calls or []:",
      '            print(call.function.name or "", call.function.arguments or "", sep="", end="", flush=True)',
    ] : [],
    "print()",
    "",
  ].join("\n");
}

// A literal of Python. Its strings and numbers are those of JSON.
function literal(value) {
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (value !== null && typeof value === "object") {
    return `{${Object.entries(value).map(([name, part]) => `${JSON.stringify(name)}: ${literal(part)}`).join(", ")}}`;
  }
  if (typeof value === "boolean") return value ? "True" : "False";
  return value === null ? "None" : JSON.stringify(value);
}

// A word of the shell.
const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
