"""The demo's small text tasks, the sentences for training and evaluation, and one adapter for each task.

A task rewrites a sentence by a rule of a few lines of Python, so any answer of the model can be checked exactly. The
base model is trained on all tasks at once, and the system message selects the task. Without a system message it repeats
the sentence. An adapter is trained on conversations without a system message, so its task becomes the default. With one
prompt and one base model, every adapter answers differently.

No word of `unseen_sentences` occurs in any training sentence. `is_held_out` excludes a tenth of all possible words, and
every English word listed here, from training. The evaluation therefore measures the rule, not memorised words.

This module does not use tokens, tensors or training code, and imports only the standard library.
"""

import random
import string
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = [
    "ADAPTERS",
    "ENGLISH_WORDS",
    "TASKS",
    "AdapterSpec",
    "Task",
    "is_held_out",
    "training_sentence",
    "unseen_sentences",
]

MAX_WORDS = 7
MAX_WORD_LETTERS = 9
MAX_UNSEEN_WORDS = 6

_ALPHABET = "abcdefghijklmnopqrstuvwxyz"
_CONSONANTS = "bcdfghjklmnpqrstvwxyz"
_VOWELS = "aeiou"
_END_MARKS = ".!?"

_ENGLISH_TEXT = """
a about above after again air all also always an and animal answer any apple are around as ask at
autumn away baby back ball bank bear because been before began below best better big bird black blue
boat body book both boy bread bridge bright brown build but butter by call came can car carry cat
chair child city clear close cloud cold come corn could country cup cut dance dark day deep did do
doctor dog door down draw dream drink dry each early earth east eat egg end enough even every eye
face fair fall family far farm fast father few field fire first fish five floor flower fly follow
food foot forest found four fox free friend from full garden gave get girl give glass go gold good
great green ground grow had half hand happy hard has have he head hear heart heavy help her here
high hill him his hold home horse hot hour house how hundred i idea if in into iron is island it jam
jump just keep kind king kitchen know lake land large last late laugh lazy leaf learn leave left
letter life light like line lion list little live long look love low made make man many map mark may
me mean meat men milk mind money moon more morning most mother mountain mouse move much music must
my name near need never new night no north nose not now number ocean of off often old on once one
only open or orange our out over own page paper part pass people piano place plain plan plant play
point poor press pull put queen question quick quiet rain ran read ready red rest rice right river
road rock room round run said salt same sand saw say school sea second see seed seem seven she ship
shoe shop short should show silver simple sing sister six sky sleep slow small snow so some song
soon sound south spring stand star start state stay step still stone stop story street strong such
sugar summer sun sure table take talk tall tea teach tell ten than that the their them then there
these they thing think this three through time to today together told too took top touch town travel
tree true try turn two under until up us use valley very village visit voice wait walk wall want war
warm was watch water way we week well went were west wet what wheat wheel when where which while
white who whole why wide wild will wind window winter wish with woman wood word work world would
write year yellow yes yet you young your zebra
"""
ENGLISH_WORDS: tuple[str, ...] = tuple(_ENGLISH_TEXT.split())
_ENGLISH = frozenset(ENGLISH_WORDS)


@dataclass(frozen=True, slots=True)
class Task:
    """A rule that rewrites a sentence. `name` is also the system message that asks the base model for this task."""

    name: str
    summary: str
    rewrite: Callable[[str], str]

    def apply(self, sentence: str) -> str:
        """Return the one right answer to `sentence`. Words are the parts between single spaces."""
        return self.rewrite(sentence)


def _by_word(rewrite_word: Callable[[str], str], joint: str = " ") -> Callable[[str], str]:
    """Turn a rule for one word into a rule for a sentence: split at spaces, rewrite each word, join with `joint`."""

    def rewrite(sentence: str) -> str:
        return joint.join(rewrite_word(word) for word in sentence.split(" "))

    return rewrite


def _without_vowels(word: str) -> str:
    return word[:1] + "".join(letter for letter in word[1:] if letter.lower() not in _VOWELS)


def _doubled(word: str) -> str:
    return "".join(letter * 2 for letter in word)


_TURN = str.maketrans(
    _ALPHABET + _ALPHABET.upper(),
    _ALPHABET[13:] + _ALPHABET[:13] + (_ALPHABET[13:] + _ALPHABET[:13]).upper(),
)

TASKS: Mapping[str, Task] = MappingProxyType(
    {
        task.name: task
        for task in (
            Task("echo", "repeats the sentence", lambda sentence: sentence),
            Task("upper", "upper case", str.upper),
            Task(
                "title",
                "first letter of each word in upper case",
                _by_word(lambda word: word[:1].upper() + word[1:]),
            ),
            Task("snake", "words joined by underscores", lambda sentence: sentence.replace(" ", "_")),
            Task(
                "rot13",
                "each letter 13 places on in the alphabet",
                lambda sentence: sentence.translate(_TURN),
            ),
            Task("devowel", "no vowels, except a word's first letter", _by_word(_without_vowels)),
            Task("initials", "first letter of each word", _by_word(lambda word: word[:1], joint="")),
            Task("spell", "letters joined by dashes", _by_word("-".join)),
            Task("double", "each letter twice", _by_word(_doubled)),
            Task("mirror", "the whole sentence backwards", lambda sentence: sentence[::-1]),
            Task(
                "reverse", "words in reverse order", lambda sentence: " ".join(reversed(sentence.split(" ")))
            ),
        )
    }
)


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """One LoRA adapter: the task that it makes the default, and its peft settings, under peft's own names.

    The adapters differ in rank, targets and scaling, so that serving them together exercises each combination.
    """

    name: str
    task: str
    r: int
    lora_alpha: int
    target_modules: tuple[str, ...]
    rank_pattern: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    alpha_pattern: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    use_rslora: bool = False
    layers_to_transform: tuple[int, ...] | None = None


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")

ADAPTERS: Mapping[str, AdapterSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            AdapterSpec("upper", "upper", 2, 4, ("q_proj", "v_proj")),
            AdapterSpec("title", "title", 4, 8, ("v_proj", "o_proj", *_MLP)),
            AdapterSpec(
                "snake",
                "snake",
                4,
                8,
                ("q_proj", "v_proj", "down_proj"),
                rank_pattern=MappingProxyType({"down_proj": 12, "layers.0.self_attn.q_proj": 1}),
                alpha_pattern=MappingProxyType({"down_proj": 6}),
            ),
            AdapterSpec("rot13", "rot13", 32, 16, ("q_proj", "v_proj", "o_proj"), use_rslora=True),
            AdapterSpec("devowel", "devowel", 64, 64, ("q_proj", "v_proj")),
            AdapterSpec("initials", "initials", 5, 10, (*_ATTENTION, *_MLP), layers_to_transform=(0, 1)),
            AdapterSpec("spell", "spell", 16, 32, _ATTENTION),
            AdapterSpec("double", "double", 8, 16, _MLP),
            AdapterSpec("mirror", "mirror", 12, 24, ("k_proj", "v_proj", "up_proj")),
            AdapterSpec("reverse", "reverse", 8, 16, (*_ATTENTION, *_MLP)),
        )
    }
)


def is_held_out(word: str) -> bool:
    """Whether `word`, in any letter case, is excluded from training.

    Every English word listed here is excluded, and a tenth of all other words. That tenth has a CRC-32 divisible by 10,
    so it is the same in every run and on every machine.
    """
    lowered = word.lower()
    return lowered in _ENGLISH or zlib.crc32(lowered.encode()) % 10 == 0


def _pseudo_word(rng: random.Random, num_letters: int) -> str:
    """A made-up word. Half of the words alternate consonants and vowels; the others have random letters."""
    if rng.random() < 0.5:
        return "".join(rng.choices(_ALPHABET, k=num_letters))
    first = rng.randrange(2)
    return "".join(rng.choice(_VOWELS if (first + i) % 2 else _CONSONANTS) for i in range(num_letters))


def _number(rng: random.Random) -> str:
    return str(rng.randrange(1000))


def _training_word(rng: random.Random) -> str:
    # Lengths 1 to 9, most often 3 to 6, roughly as in English.
    return _pseudo_word(rng, min(rng.randint(1, 5) + rng.randint(0, 4), MAX_WORD_LETTERS))


def _unseen_word(rng: random.Random) -> str:
    return rng.choice(ENGLISH_WORDS) if rng.random() < 0.5 else _pseudo_word(rng, rng.randint(2, 8))


def _draw(rng: random.Random, draw_word: Callable[[random.Random], str], *, held_out: bool) -> str:
    """Draw words until `is_held_out` of one equals `held_out`."""
    while is_held_out(word := draw_word(rng)) is not held_out:
        pass
    return word


def _words(rng: random.Random, num_words: int, *, held_out: bool) -> list[str]:
    draw_word = _unseen_word if held_out else _training_word
    words: list[str] = []
    for _ in range(num_words):
        again = bool(words) and rng.random() < 0.05
        words.append(rng.choice(words) if again else _draw(rng, draw_word, held_out=held_out))
    return words


def _with_symbol(rng: random.Random, word: str) -> str:
    """Insert a symbol into `word`, as in "don't" or "2+2". The model would never output a symbol that no training
    answer has."""
    position = rng.randint(0, len(word))
    return word[:position] + rng.choice(string.punctuation) + word[position:]


def _sentence(rng: random.Random, num_words: int, *, held_out: bool) -> str:
    """Mostly plain lower-case words. A third of the sentences may have a number, symbols, capitals, a comma or an
    end mark."""
    words = _words(rng, num_words, held_out=held_out)
    if rng.random() < 0.67:
        return " ".join(words)
    if rng.random() < 0.2:
        words[rng.randrange(num_words)] = _draw(rng, _number, held_out=held_out)
    if rng.random() < 0.2:
        position = rng.randrange(num_words)
        words[position] = words[position].capitalize()
    if rng.random() < 0.5:
        for _ in range(rng.randint(1, 2)):
            position = rng.randrange(num_words)
            words[position] = _with_symbol(rng, words[position])
    if rng.random() < 0.2 and num_words > 1:
        words[rng.randrange(num_words - 1)] += ","
    if rng.random() < 0.5:
        words[0] = words[0].capitalize()
    return " ".join(words) + (rng.choice(_END_MARKS) if rng.random() < 0.6 else "")


def training_sentence(rng: random.Random, max_words: int = MAX_WORDS) -> str:
    """Draw one sentence of 1 to `max_words` words, none of them held out."""
    return _sentence(rng, rng.randint(1, max_words), held_out=False)


def unseen_sentences(n: int, seed: int = 0) -> list[str]:
    """Return `n` sentences of 1 to 6 held-out words, half of them English. The same `seed` returns the same
    sentences."""
    rng = random.Random(seed)
    return [_sentence(rng, rng.randint(1, MAX_UNSEEN_WORDS), held_out=True) for _ in range(n)]
