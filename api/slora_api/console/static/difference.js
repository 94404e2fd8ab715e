// What differs between texts, word by word.

// The longest comparison, in pairs of words. Beyond it, everything between the first and the last difference differs.
const MAX_PAIRS = 1_000_000;

// Returns the parts of each text as [text, differs]. A word of the first text differs if no other text has it in its place,
// and a word of another text if the first text lacks it.
export function markDifferences(texts) {
  const [first, ...others] = texts.map((text) => text.match(/\s*\S+\s*/g) ?? []);
  const inAny = new Set();
  const parts = others.map((words) => {
    const [inFirst, inOther] = findCommon(first, words);
    inFirst.forEach((at) => inAny.add(at));
    return join(words, inOther);
  });
  return [join(first, inAny), ...parts];
}

export const countWords = (parts) => parts.reduce((sum, [text, differs]) => sum + (differs ? text.trim().split(/\s+/).length : 0), 0);

// Joins neighbours that are alike.
function join(words, common) {
  const parts = [];
  words.forEach((word, at) => {
    const differs = !common.has(at);
    if (parts.at(-1)?.[1] === differs) parts.at(-1)[0] += word;
    else parts.push([word, differs]);
  });
  return parts;
}

// Returns the places of a longest common subsequence in both lists of words.
function findCommon(one, other) {
  const found = [new Set(), new Set()];
  const keep = (at, otherAt) => {
    found[0].add(at);
    found[1].add(otherAt);
  };
  const [words, otherWords] = [one, other].map((list) => list.map((word) => word.trim()));
  const isSame = (at, otherAt) => words[at] === otherWords[otherAt];
  let start = 0, end = one.length, otherEnd = other.length;
  for (; start < end && start < otherEnd && isSame(start, start); start++) keep(start, start);
  while (end > start && otherEnd > start && isSame(end - 1, otherEnd - 1)) keep(--end, --otherEnd);
  const rows = end - start, columns = otherEnd - start;
  if (rows * columns > MAX_PAIRS) return found;
  // The lengths of common subsequences of the words from a place on.
  const lengths = new Uint16Array((rows + 1) * (columns + 1));
  const lengthAt = (row, column) => lengths[row * (columns + 1) + column];
  for (let row = rows - 1; row >= 0; row--) {
    for (let column = columns - 1; column >= 0; column--) {
      lengths[row * (columns + 1) + column] = isSame(start + row, start + column)
        ? lengthAt(row + 1, column + 1) + 1 : Math.max(lengthAt(row + 1, column), lengthAt(row, column + 1));
    }
  }
  for (let row = 0, column = 0; row < rows && column < columns;) {
    if (isSame(start + row, start + column)) keep(start + row++, start + column++);
    else if (lengthAt(row + 1, column) >= lengthAt(row, column + 1)) row++;
    else column++;
  }
  return found;
}
