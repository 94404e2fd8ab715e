// The files of an upload, as the user chose or dropped them.

const FIELDS = {
  "adapter_config.json": "config",
  "adapter_model.safetensors": "weights",
  "tokenizer_config.json": "tokenizer_config",
  "chat_template.jinja": "chat_template",
  "generation_config.json": "generation_config",
  "tokenizer.json": "tokenizer",
  "special_tokens_map.json": "special_tokens_map",
  "added_tokens.json": "added_tokens",
  "chat_template.json": "chat_template_json",
  "tool_use.jinja": "tool_template",
};
const ARCHIVE = /^(.+)\.(zip|tar|tar\.gz|tgz)$/;
const MAX_ENTRIES = 1000;

// Chooses what is uploaded. items: [{file, folder}], where `folder` is the name of the folder that has the file.
// Returns {fields: {field: file}, name, ignored: [names], problem}; `problem` says what is missing.
export function chooseFiles(items) {
  const archives = items.filter(({ file }) => ARCHIVE.test(file.name));
  if (archives.length === 1 && !items.some(({ file }) => file.name in FIELDS)) {
    const [{ file }] = archives;
    const ignored = items.filter((one) => one.file !== file).map((one) => one.file.name);
    return { fields: { archive: file }, name: ARCHIVE.exec(file.name)[1], ignored, problem: null };
  }
  const fields = {};
  const ignored = [];
  let folder = null;
  let problem = null;
  for (const item of items) {
    const field = FIELDS[item.file.name];
    if (field === undefined) {
      ignored.push(item.file.name);
    } else if (field in fields) {
      problem = `There is more than one ${item.file.name}. Choose the folder of one adapter.`;
    } else {
      fields[field] = item.file;
      if (field === "config") folder = item.folder;
    }
  }
  const missing = ["adapter_config.json", "adapter_model.safetensors"].filter((name) => !(FIELDS[name] in fields));
  if (missing.length > 0) {
    problem ??= `There is no ${missing.join(" and no ")}. Choose both files of a PEFT adapter, its folder, or one archive `
      + "of it (.zip, .tar, .tar.gz).";
  }
  return { fields, name: folder, ignored, problem };
}

export const fromInput = (files) => [...files].map((file) => ({ file, folder: parentOf(file.webkitRelativePath) }));

// The files of a drop. Folders are read with what they contain, up to 1,000 entries.
export async function fromDrop(transfer) {
  // The browser empties the list when this function first waits.
  const entries = [...transfer.items].filter((item) => item.kind === "file").map((item) => item.webkitGetAsEntry());
  const found = [];
  let numLeft = MAX_ENTRIES;
  async function walk(entry) {
    if (numLeft-- <= 0) return;
    if (entry.isFile) {
      const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
      found.push({ file, folder: parentOf(entry.fullPath) });
      return;
    }
    const reader = entry.createReader();
    for (;;) {
      const batch = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
      if (batch.length === 0) return;
      for (const one of batch) await walk(one);
    }
  }
  for (const entry of entries) if (entry !== null) await walk(entry);
  return found.length > 0 ? found : fromInput(transfer.files);
}

const parentOf = (path) => path.split("/").at(-2) || null;
