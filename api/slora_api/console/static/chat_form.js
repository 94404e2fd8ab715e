// The form of the playground, and the chat request that it stands for.

export const SAMPLING = [
  { field: "max_tokens", title: "Max tokens", initial: "200", step: "1" },
  { field: "temperature", title: "Temperature", step: "any" },
  { field: "top_p", title: "Top p", step: "any" },
  { field: "top_k", title: "Top k", step: "1" },
  { field: "min_p", title: "Min p", step: "any" },
  { field: "repetition_penalty", title: "Repetition penalty", step: "any" },
  { field: "seed", title: "Seed", step: "1" },
];
export const EMPTY = { system: "", user: "", stop: "", tools: "", format: "text", schema: "",
  ...Object.fromEntries(SAMPLING.map(({ field, initial = "" }) => [field, initial])) };

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

// Reads a text of JSON. Returns {value}, or {problem}.
function readJson(text, isRight, wanted) {
  try {
    const value = JSON.parse(text);
    return isRight(value) ? { value } : { problem: `This has to be ${wanted}.` };
  } catch (error) {
    return { problem: text.trim() === "" ? `Write ${wanted}.` : `This is not JSON: ${error.message}.` };
  }
}

// What the form has as JSON: {tools, schema}, each as from `readJson`, or empty if it is not sent.
export const readWritten = (form) => ({
  tools: form.tools.trim() === "" ? {}
    : readJson(form.tools, (value) => Array.isArray(value) && value.length > 0 && value.every(isObject), "an array of tools"),
  schema: form.format === "json_schema" ? readJson(form.schema, isObject, "a JSON schema, which is an object") : {},
});

// Returns the fields of a request that name a model, or {problem}. Adapters with weights, such as "legal@prod*0.8 + brief",
// are combined; a weight is 1 unless it is given.
export function readModel(text) {
  if (!/[*+]/.test(text)) return { model: text };
  const adapters = text.split("+").map((part) => {
    const [name, weight = "1", ...others] = part.split("*").map((one) => one.trim());
    return { name, weight: weight === "" || others.length > 0 ? NaN : Number(weight) };
  });
  const isRight = adapters.every(({ name, weight }) => name !== "" && Number.isFinite(weight));
  return isRight ? { model: "default", adapters } : { problem: "Write adapters and weights as in legal@prod*0.8 + brief*-0.5." };
}

// Only what the user has filled in is sent. Returns null if JSON of the form is wrong.
export function makeBody(model, form, { tools, schema }) {
  if (tools.problem || schema.problem) return null;
  const messages = [{ role: "user", content: form.user }];
  if (form.system.trim() !== "") messages.unshift({ role: "system", content: form.system });
  const set = SAMPLING.filter(({ field }) => form[field] !== "").map(({ field }) => [field, Number(form[field])]);
  const formats = {
    text: {},
    json_object: { response_format: { type: "json_object" } },
    json_schema: { response_format: { type: "json_schema", json_schema: { name: "answer", schema: schema.value } } },
  };
  return {
    ...model, messages, ...Object.fromEntries(set), ...form.stop !== "" && { stop: [form.stop] },
    ...tools.value && { tools: tools.value }, ...formats[form.format],
  };
}
