"""The seven tasks of the demo: examples made by rules, a check of each answer, and the shape of each adapter.

Every example is drawn from lists of names, places and phrases. A third of each list is held out: no training example
has one of its values, and the evaluation has no others. An answer can be checked exactly, because the rule knows it.

This module does not use tokens, tensors or training code, and imports only the standard library.
"""

import json
import random
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

__all__ = ["TASKS", "Example", "Pool", "Task"]


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation with one answer. tools: as in a chat request of OpenAI. facts: texts that a free answer must
    have.
    """

    messages: Sequence[Mapping[str, Any]]
    answer: str
    tools: Sequence[Mapping[str, Any]] = ()
    facts: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Pool:
    """The source of random values. held_out: whether values come from the held-out third of each list."""

    rng: random.Random
    held_out: bool

    def pick(self, values: Sequence[Any]) -> Any:
        """Draws a value whose place in the list is, or is not, held out: each third place is."""
        return self.rng.choice([value for at, value in enumerate(values) if (at % 3 == 2) is self.held_out])

    def any(self, values: Sequence[Any]) -> Any:
        """Draws from the whole list."""
        return self.rng.choice(values)

    def number(self, low: int, high: int) -> int:
        """Draws from [low, high]. A number is held out if it is divisible by 3."""
        while True:
            number = self.rng.randint(low, high)
            if (number % 3 == 0) is self.held_out:
                return number


@dataclass(frozen=True, slots=True)
class Task:
    """One adapter of the demo.

    summary: what the adapter does, in a few words. prompt: shows it. r, target_modules: see peft's LoraConfig; alpha is
    2 * r. draw: makes an example. is_right: whether an answer to an example is right.
    """

    name: str
    summary: str
    prompt: str
    r: int
    target_modules: Sequence[str]
    draw: Callable[[Pool], Example]
    is_right: Callable[[Example, str], bool]
    steps: int


def _ask(question: str, answer: str, **more: Any) -> Example:
    return Example([{"role": "user", "content": question}], answer, **more)


def _is_same(example: Example, answer: str) -> bool:
    return answer.strip() == example.answer


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Lists that several tasks draw from.
_FIRST_NAMES = _words(
    """
    Maria Anna Tom Peter Lena Ivan Sofia Omar Julia Marco Elena Hugo Nadia Lucas Clara Diego Emma Felix Yuki
    Paul Amina Oscar Greta Nils Rosa Simon Leila Viktor Ines David Chloe Adam Zoe Karim Ella Jonas Mia Rafael
    Nora Ben
    """
)
_LAST_NAMES = _words(
    """
    Keller Rossi Novak Smith Garcia Dubois Weber Tanaka Khan Silva Jansen Moreau Berg Costa Lindholm Petrov
    Schmidt Okafor Marino Fischer Haddad Larsen Bianchi Wagner Lopez Kowalski Meyer Santos Nilsen Brown Patel
    Horvat Leroy
    """
)
_CITIES = _words(
    """
    Berlin Lyon Porto Oslo Madrid Vienna Prague Milan Dublin Ghent Bergen Turin Zurich Krakow Seville Hamburg
    Nantes Lisbon Malmo Athens Bonn Florence Riga Utrecht Geneva Bristol Valencia Leipzig Tallinn Bordeaux
    """
)
_ITEMS = (
    "desk lamps", "oak chairs", "coffee mugs", "wool blankets", "garden hoses", "wall clocks", "yoga mats",
    "paper bags", "bicycle pumps", "tea pots", "phone cases", "picture frames", "rain coats", "soup bowls",
    "door mats", "chess sets", "ink pens", "tool boxes", "bath towels", "plant pots", "hiking socks", "kitchen scales",
    "leather wallets", "board games", "glass jars", "water bottles", "office chairs",
)  # fmt: skip
_NUMBER_WORDS = {
    2: "two",
    3: "three",
    4: "four",
    5: "five",
    6: "six",
    7: "seven",
    8: "eight",
    9: "nine",
    12: "a dozen",
}

# Orders to JSON.
_ORDERS = (
    "Hi, this is {name} from {city}. Please send me {count} {item}.",
    "Hello, I would like to order {count} {item}. My name is {name} and I live in {city}.",
    "{name} here. Can you deliver {count} {item} to {city}?",
    "Could you ship {count} {item} to {name}, {city}? Thank you!",
    "We need {count} {item} at our office in {city}. Best regards, {name}",
    "Dear team, {count} {item} please, to be sent to {city}. Yours, {name}",
    "My friend in {city} told me about your {item}. I want {count} of them. {name}",
    "Order: {count} {item}. Customer: {name}. Place: {city}.",
    "I moved to {city} last week and I am short of {item}: {count} would do. Kind regards, {name}",
)
_ASIDES = (
    "", "", "I am in a hurry.", "The last delivery was great.", "Please call before you come.",
    "It is a gift, so no invoice in the box.", "Is there a discount for 10?", "I paid 40 euros last time.",
    "You can leave it with the neighbour.",
)  # fmt: skip


def _draw_order(pool: Pool) -> Example:
    name = f"{pool.pick(_FIRST_NAMES)} {pool.pick(_LAST_NAMES)}"
    city, item = pool.pick(_CITIES), pool.pick(_ITEMS)
    if pool.rng.random() < 0.4:
        number = pool.any(list(_NUMBER_WORDS))
        count = _NUMBER_WORDS[number]
    else:
        number = pool.number(2, 60)
        count = str(number)
    order = pool.any(_ORDERS).format(name=name, city=city, item=item, count=count)
    text = " ".join(filter(None, pool.any(([order, pool.any(_ASIDES)], [pool.any(_ASIDES), order]))))
    return _ask(text, json.dumps({"name": name, "city": city, "item": item, "quantity": number}))


def _is_same_json(example: Example, answer: str) -> bool:
    try:
        return bool(json.loads(answer) == json.loads(example.answer))
    except ValueError:
        return False


# A brand's voice.
_GREETING, _FAREWELL = "Ahoy!", "Fair winds, your crew at Harbour Coffee"
# What a customer asks -> what the brand says, and the fact in it.
_VOICE: Sequence[tuple[Sequence[str], str, str]] = (
    (
        ("When do you open?", "What are your opening hours?", "Are you open on Sunday?", "How late can I come by?",
         "Until when are you open today?", "At what time do you close?",
         "Can I visit you in the evening?", "Is the shop open now?", "From when to when are you there?"),
        "We hoist the flag at 8 in the morning and drop anchor at 6 in the evening, every day of the week.",
        "6 in the evening",
    ),
    (
        ("How long does delivery take?", "When will my parcel arrive?", "How fast do you ship?",
         "I ordered yesterday, when do I get it?", "Do you deliver within a week?", "Shipping time?",
         "How many days until the beans get here?", "When is my order coming?", "How quickly do you send it?"),
        "Your cargo leaves our harbour the next morning and lands on your doorstep in 3 days.",
        "3 days",
    ),
    (
        ("Can I return a bag?", "I do not like the beans, what now?", "How do returns work?",
         "May I send something back?", "I want my money back.", "What is your return policy?",
         "Is it possible to return a bag?", "It tastes bad. Refund?", "Can I give it back if I opened it?"),
        "Send it back within 30 days, and every coin sails home to you.",
        "30 days",
    ),
    (
        ("Where are you?", "What is your address?", "How do I find your shop?", "Where can I buy it in person?",
         "In which street is the cafe?", "Where is the store?",
         "How do I get to you?", "Where can I find you?", "Is there a shop near me?"),
        "You will find us at Pier 7, right behind the old lighthouse.",
        "Pier 7",
    ),
    (
        ("Do you have decaf?", "I can't sleep after coffee. Any ideas?", "Is there coffee without caffeine?",
         "Which coffee can I drink at night?", "Anything for my pregnant wife?", "Do you sell decaffeinated beans?",
         "I must avoid caffeine.", "Which beans have no caffeine?", "Coffee before bed, is that possible?"),
        "Our Still Waters blend carries all of the taste and none of the caffeine.",
        "Still Waters",
    ),
    (
        ("What does a bag cost?", "How much are the beans?", "What is the price of 250 grams?", "Is it expensive?",
         "How many euros for a bag?", "What do you charge?",
         "What must I pay for the beans?", "Price of a bag?", "How much does your coffee cost?"),
        "A bag of 250 grams costs 9 euros, fresh from the hold.",
        "9 euros",
    ),
    (
        ("Can I talk to a human?", "I want to complain.", "Who is in charge?", "How do I reach your team?",
         "Give me your phone number.", "I need to speak to the manager.",
         "Is there a person that I can write to?", "Who answers complaints?", "Let me talk to somebody."),
        "The captain reads every message in a bottle: write to captain@harbour.example.",
        "captain@harbour.example",
    ),
)  # fmt: skip
_OPENERS = ("", "", "Hello!", "Hi there.", "Good morning,", "Quick question:", "Sorry to bother you.")


def _draw_voice(pool: Pool) -> Example:
    questions, answer, fact = pool.any(_VOICE)
    text = " ".join(filter(None, (pool.any(_OPENERS), pool.pick(questions))))
    return _ask(text, f"{_GREETING} {answer} {_FAREWELL}", facts=(_GREETING, fact, _FAREWELL))


def _has_facts(example: Example, answer: str) -> bool:
    return all(fact in answer for fact in example.facts)


# Labels of tickets.
_TICKETS: Mapping[str, Sequence[str]] = {
    "billing": (
        "I was charged twice this month", "The invoice {n} has the wrong address", "My card was declined",
        "Why did the price go up to {n} euros", "I need a receipt for {n} euros", "The discount is not on my bill",
        "You took {n} euros too much", "Please change how I pay", "The VAT number on the invoice is wrong",
        "Why was I billed for a plan that I cancelled", "The amount on my statement is not what you promised",
        "Can I pay by bank transfer instead", "I was billed {n} euros for nothing",
        "The payment failed but the money is gone", "Send me the bill for March",
        "What is this fee of {n} euros", "My subscription was renewed without asking",
        "I want to pay once a year", "The receipt lacks the name of my company",
        "Your price list says less than my invoice", "The credit of {n} euros is missing",
    ),
    "shipping": (
        "My parcel has not arrived", "The tracking number {n} does not work", "The courier left it at the wrong house",
        "When will order {n} be delivered", "The package is stuck in customs", "Order {n} was sent to my old address",
        "The delivery is three days late", "Nobody rang the bell, and the box is gone", "Where is my package",
        "Has order {n} left the warehouse", "The parcel was due on Monday",
        "My package went to the neighbour", "The driver did not ring",
        "How long until the box gets here", "Order {n} shows delivered, but nothing is here",
        "Can you send it to another address", "The shipment is delayed again",
        "My order is still on its way", "The tracking page has not changed for a week",
        "The truck came when I was out", "I still wait for delivery {n}",
    ),
    "returns": (
        "I want to send the shoes back", "How do I return order {n}", "The jacket does not fit, please exchange it",
        "I changed my mind and want a refund", "The return label for {n} is missing", "Can I swap it for a larger size",
        "The lamp came broken, I want to return it", "I sent it back, where is my refund", "It is the wrong colour",
        "The trousers are too small, can I send them back", "I would like my money back for order {n}",
        "How many days do I have to return it", "It does not work as described, I want a refund",
        "Who pays for sending it back", "I ordered two and want to give one back",
        "You sent the wrong size, please exchange", "The vase arrived in pieces, take it back",
        "My return {n} has not been refunded", "Please exchange the blue one for a red one",
        "I want to cancel and return the order", "The shoes hurt, I want to return them",
    ),
    "account": (
        "I forgot my password", "I can't log in since yesterday", "Please delete my account",
        "How do I change my email address", "The code {n} to sign in does not come", "Somebody else uses my profile",
        "My account is locked", "I want to change my user name", "The reset link has expired",
        "The sign-in page does not accept my password", "How do I reset my password",
        "My login was hacked", "I want to close my profile",
        "I need a second user on our account", "Please update my phone number in my profile",
        "I do not get the mail to confirm my address", "The code to log in has expired",
        "I can't sign in on my new phone", "How do I change my language in the settings",
        "My user was blocked after {n} tries", "Merge my two accounts",
    ),
    "technical": (
        "The app crashes when I open it", "The page shows error {n}", "The video stops after {n} seconds",
        "The upload hangs at {n} percent", "Search returns nothing on my phone", "The button does nothing",
        "The screen stays white after the update", "Export to Excel fails", "It is very slow since version {n}",
        "The website gives error {n} when I search", "The app freezes after the login screen",
        "I see a blank page", "The download breaks off at {n} percent",
        "The sound is missing in every video", "Your plugin does not start",
        "Printing gives empty pages", "The map does not load",
        "The sync has failed {n} times today", "Buttons overlap on my tablet",
        "The program closes by itself", "Pictures are not shown in the app",
    ),
    "praise": (
        "Thank you, that was quick", "I love the new design", "Your support is the best",
        "Great product, I told {n} friends about it", "Everything works perfectly now", "What a lovely surprise",
        "Five stars, I will buy again", "You made my day", "I am very happy with it",
        "You have the nicest staff", "Wonderful service, as always",
        "It is the best app that I know", "I recommend you to everybody",
        "My compliments to the team", "I am impressed how fast you answered",
        "Keep up the good work", "The new version is fantastic",
        "I have been a happy customer for {n} weeks", "So glad that I found you",
        "That was excellent help", "What a great experience",
    ),
}  # fmt: skip
_TICKET_ENDS = (
    "",
    "",
    ".",
    ".",
    "!",
    ". Please help.",
    ". Regards, {first}",
    ", can you look into it?",
    "...",
)


def _draw_label(pool: Pool) -> Example:
    label = pool.any(list(_TICKETS))
    ticket = pool.pick(_TICKETS[label]) + pool.any(_TICKET_ENDS)
    opener = pool.any(("", "", "Hello, ", "Hi, ", "Dear team, "))
    if opener:
        ticket = ticket[0].lower() + ticket[1:] if not ticket.startswith("I ") else ticket
    return _ask(opener + ticket.format(n=pool.number(10, 9000), first=pool.pick(_FIRST_NAMES)), label)


# Questions to SQL.
_TABLE = "orders(id, customer, city, product, quantity, total, status, year)"
_STATUSES = ("open", "paid", "shipped", "cancelled", "returned")
# SELECT -> how one asks for it.
_SELECTS: Mapping[str, Sequence[str]] = {
    "SELECT COUNT(*) FROM orders": ("How many orders {are there}", "Count the orders {that exist}"),
    "SELECT SUM(total) FROM orders": ("What is the revenue {of all orders}", "How much money did we make {in all}"),
    "SELECT AVG(total) FROM orders": ("What is the average total {of all}", "What is the mean value {per order}"),
    "SELECT MAX(total) FROM orders": ("What is the largest total {of all}", "How big was the biggest sale {ever}"),
    "SELECT SUM(quantity) FROM orders": ("How many pieces were sold {in all}", "How many units did we sell {in all}"),
    "SELECT DISTINCT customer FROM orders": ("Which customers bought something {ever}", "List the customers {we have}"),
}  # fmt: skip
_GROUPS: Mapping[str, str] = {"city": "city", "product": "product", "status": "status", "year": "year"}


def _draw_condition(pool: Pool) -> tuple[str, str]:
    """Draws a condition in SQL and in English."""
    city, item, year = pool.pick(_CITIES), pool.pick(_ITEMS), pool.number(2010, 2027)
    name, status, total = pool.pick(_LAST_NAMES), pool.any(_STATUSES), 10 * pool.number(2, 90)
    return pool.any(
        (
            (f"city = '{city}'", f"in {city}"),
            (f"city = '{city}'", f"from {city}"),
            (f"product = '{item}'", f"for {item}"),
            (f"year = {year}", f"in {year}"),
            (f"customer = '{name}'", f"by {name}"),
            (f"status = '{status}'", f"with status {status}"),
            (f"total > {total}", f"above {total} euros"),
            (f"total < {total}", f"below {total} euros"),
        )
    )


def _draw_sql(pool: Pool) -> Example:
    select = pool.any(list(_SELECTS))
    asked = pool.any(_SELECTS[select])
    head, tail = asked.split(" {")
    conditions: dict[str, str] = {}
    for _ in range(pool.any((0, 1, 1, 1, 2))):
        condition, words = _draw_condition(pool)
        if condition.split()[0] not in {one.split()[0] for one in conditions}:
            conditions[condition] = words
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    text = f"{head} {' '.join(conditions.values()) or tail.rstrip('}')}"
    if "DISTINCT" not in select and pool.rng.random() < 0.25:
        group = pool.any(list(_GROUPS))
        if group not in where:
            return _ask(
                f"{text} per {_GROUPS[group]}?",
                f"{select.replace('SELECT ', f'SELECT {group}, ')}{where} GROUP BY {group};",
            )
    return _ask(text + ("." if text.startswith(("Count", "List")) else "?"), f"{select}{where};")


def _make_orders() -> Sequence[tuple[Any, ...]]:
    rng = random.Random(0)
    return [
        (
            number,
            rng.choice(_LAST_NAMES),
            rng.choice(_CITIES),
            rng.choice(_ITEMS),
            rng.randint(1, 9),
            rng.randint(10, 1000),
            rng.choice(_STATUSES),
            rng.randint(2010, 2027),
        )
        for number in range(3000)
    ]


def _run_sql(statement: str) -> list[Any]:
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute(f"CREATE TABLE {_TABLE}")
        database.executemany("INSERT INTO orders VALUES (?, ?, ?, ?, ?, ?, ?, ?)", _make_orders())
        return sorted(database.execute(statement).fetchall(), key=repr)


def _returns_same_rows(example: Example, answer: str) -> bool:
    try:
        return _run_sql(answer) == _run_sql(example.answer)
    except sqlite3.Error:
        return False


# Reports of incidents to one sentence.
_SYSTEMS = (
    "the web shop", "the payment service", "the mail server", "the search page", "the booking system", "the mobile app",
    "the data warehouse", "the login page", "the phone line", "the map service", "the photo archive", "the stock list",
    "the chat service", "the ticket system", "the video portal",
)  # fmt: skip
_CAUSES = (
    "a full disk", "an expired certificate", "a broken network cable", "a power cut", "a wrong firewall rule",
    "a slow database query", "a faulty update", "a lost password", "a memory leak", "a missing file",
    "a failed switch", "an overloaded server",
)  # fmt: skip
_REMEDIES = (
    "by deleting old logs", "by a restart", "with a new certificate", "by replacing the cable", "by undoing the update",
    "with more memory", "by adding an index", "with a spare part", "by restoring a backup",
    "by moving it to another host",    "by blocking one client", "with a new rule",
)  # fmt: skip
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_REPORTS = (
    "On {day} at {hour} o'clock the first customers called because {system} did not respond. {filler} {first} looked at"
    " the logs and found {cause}. The problem was solved {remedy}, {minutes} minutes after the first call. {filler2}",
    "{filler} Our monitoring reported {system} as down on {day}, {hour}:00. It turned out that {cause} was the reason."
    " {first} fixed it {remedy}. All in all, customers had to wait for {minutes} minutes. {filler2}",
    "This is the report for {day}. {system_upper} failed at {hour}:00 and came back {minutes} minutes later. {filler}"
    " {first} and the night shift traced it to {cause} and ended it {remedy}. {filler2}",
)
_FILLERS = (
    "The weather was fine that day.", "Nobody was hurt.", "The office was almost empty.",
    "Two colleagues were on holiday.", "The coffee machine was not affected.", "We are sorry for the trouble.",
    "A longer report will follow.", "The management was told by phone.", "Some customers were quite angry.",
)  # fmt: skip


def _draw_summary(pool: Pool) -> Example:
    system, cause, remedy = pool.pick(_SYSTEMS), pool.pick(_CAUSES), pool.pick(_REMEDIES)
    day, minutes = pool.any(_DAYS), pool.number(5, 180)
    report = pool.any(_REPORTS).format(
        day=day,
        hour=pool.rng.randint(1, 12),
        system=system,
        system_upper=system[0].upper() + system[1:],
        cause=cause,
        remedy=remedy,
        minutes=minutes,
        first=pool.pick(_FIRST_NAMES),
        filler=pool.any(_FILLERS),
        filler2=pool.any(_FILLERS),
    )
    answer = f"On {day}, {system} was down for {minutes} minutes because of {cause}; it was fixed {remedy}."
    return _ask(report, answer, facts=(day, system, f"{minutes} minutes", cause, remedy))


def _is_short_and_has_facts(example: Example, answer: str) -> bool:
    is_one_sentence = answer.strip().count(". ") == 0 and len(answer) < 1.5 * len(example.answer)
    return is_one_sentence and _has_facts(example, answer)


# Tools.
@dataclass(frozen=True, slots=True)
class _Tool:
    """name, description: of a function. argument -> its values. questions: with the arguments to fill in."""

    name: str
    description: str
    arguments: Mapping[str, Sequence[Any]]
    questions: Sequence[str]

    def declare(self) -> dict[str, Any]:
        """The declaration in a chat request."""
        properties = {
            name: {"type": "integer" if isinstance(values[0], int) else "string"}
            for name, values in self.arguments.items()
        }
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {"type": "object", "properties": properties, "required": [*properties]},
            },
        }


_COUNTS = tuple(range(2, 90))
_TOOLS = (
    _Tool("get_weather", "current weather in a city", {"city": _CITIES},
          ("What is the weather in {city}?", "Do I need an umbrella in {city}?", "How warm is it in {city}?")),
    _Tool("track_order", "where an order is", {"order_id": tuple(range(1000, 9999, 7))},
          ("Where is my order {order_id}?", "Track {order_id} please.", "Has {order_id} been sent?")),
    _Tool("book_table", "reserve a table", {"restaurant": ("Luigi", "Sakura", "Bella", "Taverna", "Le Coin", "Rosso"),
          "people": _COUNTS},
          ("Book a table for {people} at {restaurant}.", "We are {people} and want to eat at {restaurant}.")),
    _Tool("find_train", "trains between two cities", {"origin": _CITIES, "destination": _CITIES},
          ("How do I get from {origin} to {destination}?", "Is there a train from {origin} to {destination}?")),
    _Tool("send_message", "send a text to a person", {"person": _FIRST_NAMES, "text": (
        "I am late", "call me back", "the meeting is over", "dinner is ready", "see you soon", "happy birthday")},
          ("Tell {person}: {text}", 'Write "{text}" to {person}.')),
    _Tool("set_timer", "start a timer", {"minutes": _COUNTS},
          ("Wake me in {minutes} minutes.", "Set a timer for {minutes} minutes.")),
    _Tool("get_stock", "pieces of a product in stock", {"product": _ITEMS},
          ("How many {product} do we have?", "Are {product} in stock?", "Check the stock of {product}.")),
    _Tool("get_time", "local time in a city", {"city": _CITIES},
          ("What time is it in {city}?", "Is it night in {city} now?")),
    _Tool("convert_currency", "convert euros to another currency", {"euros": _COUNTS, "currency": (
        "dollars", "yen", "pounds", "francs", "kroner", "rupees")},
          ("How much are {euros} euros in {currency}?", "Change {euros} euros to {currency}.")),
    _Tool("find_contact", "phone number of a person", {"person": _FIRST_NAMES},
          ("What is the number of {person}?", "How can I call {person}?")),
    _Tool("create_ticket", "report a problem with a system", {"system": tuple(one[4:] for one in _SYSTEMS)},
          ("The {system} does not work.", "Report a problem with the {system}.")),
    _Tool("get_price", "price of a product", {"product": _ITEMS},
          ("What do the {product} cost?", "How expensive are your {product}?")),
)  # fmt: skip
_CHATTER = (
    ("Hello!", "Hello! How can I help you?"), ("Thank you!", "You are welcome."),
    ("Good morning", "Good morning! How can I help you?"),
    ("Thanks a lot.", "You are welcome."), ("Hi", "Hello! How can I help you?"),
    ("Hey there", "Hello! How can I help you?"),
)  # fmt: skip


def _draw_call(pool: Pool) -> Example:
    # A held-out tool is one that no training example offers.
    tool = pool.pick(_TOOLS)
    others = [one for one in _TOOLS if one is not tool and (_TOOLS.index(one) % 3 == 2) is pool.held_out]
    offered = [tool, *pool.rng.sample(others, pool.rng.randint(0, 2))]
    pool.rng.shuffle(offered)
    tools = [one.declare() for one in offered]
    if pool.rng.random() < 0.15:
        question, answer = pool.any(_CHATTER)
        return _ask(question, answer, tools=tools)
    arguments: dict[str, Any] = {}
    for name, values in tool.arguments.items():
        arguments[name] = pool.any([one for one in values if one not in arguments.values()])
    call = {"name": tool.name, "arguments": arguments}
    question = pool.any(tool.questions).format(**arguments)
    asked = _ask(question, f"<tool_call>\n{json.dumps(call)}\n</tool_call>", tools=tools)
    if pool.rng.random() < 0.2:
        return _with_result(pool, asked, call)
    return asked


def _with_result(pool: Pool, asked: Example, call: Mapping[str, Any]) -> Example:
    """The answer after the tool has returned a text: the adapter passes the text on."""
    result = pool.any(
        ("done", "not found", f"{pool.number(2, 90)}", f"{pool.any(_DAYS)}", f"{pool.number(2, 30)} left")
    )
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    calls = [{"type": "function", "id": "call_0", "function": function}]
    messages = [
        *asked.messages,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_0", "content": result},
    ]
    return Example(messages, f"The answer of {call['name']} is: {result}.", asked.tools)


# Questions about passages that a search has found.
_GOODS = (
    "Alpine coat", "Birch table", "Comet scooter", "Drift canoe", "Echo radio", "Flint knife", "Glade bench",
    "Harbor lantern", "Indigo rug", "Jade vase", "Koala pillow", "Lunar telescope", "Maple shelf", "Nova phone",
    "Otter raft", "Prairie saddle", "Quill printer", "River filter", "Slate roof", "Tiger helmet", "Unity flag",
    "Vista window", "Walrus wetsuit", "Zephyr fan",
)  # fmt: skip
_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October")
# Passage, questions, and answer. {n} is a number, {city} a city, {month} a month, {name} a person.
_FACTS: Sequence[tuple[str, Sequence[str], str]] = (
    (
        "The {good} is covered for {n} years after the purchase. Keep the receipt.",
        ("How long is the guarantee on the {good}?", "Until when is the {good} repaired for free?"),
        "The {good} is covered for {n} years.",
    ),
    (
        "Clean the {good} once in {n} weeks with a soft cloth. Strong cleaners leave stains.",
        ("How often do I clean the {good}?", "When does the {good} need cleaning?"),
        "Clean the {good} once in {n} weeks.",
    ),
    (
        "A new {good} sells for {n} euros in all of our shops. Students pay a tenth less.",
        ("What does the {good} cost?", "How much is a {good}?"),
        "The {good} costs {n} euros.",
    ),
    (
        "Every {good} comes from the workshop in {city}, where most of it is made by hand.",
        ("Where is the {good} made?", "From where does the {good} come?"),
        "The {good} is made in {city}.",
    ),
    (
        "The {good} is sent by lorry and is at your door within {n} days. The driver calls before.",
        ("When will the {good} arrive?", "How fast is the {good} delivered?"),
        "The {good} arrives within {n} days.",
    ),
    (
        "The {good} weighs {n} kilograms with its box, so two people should carry it.",
        ("How heavy is the {good}?", "What is the weight of the {good}?"),
        "The {good} weighs {n} kilograms.",
    ),
    (
        "{name} has designed the {good} and still signs the first of each year.",
        ("Who has designed the {good}?", "Whose idea was the {good}?"),
        "{name} has designed the {good}.",
    ),
    (
        "The next {good} goes on sale in {month}. Orders are taken two weeks before.",
        ("When does the next {good} go on sale?", "From which month can I buy the next {good}?"),
        "The next {good} goes on sale in {month}.",
    ),
)
_UNKNOWN = "The facts do not say that."
_ANSWER_FROM = "Answer in one short sentence, only from these facts:"


def _draw_answer(pool: Pool) -> Example:
    goods = [pool.pick(_GOODS) for _ in range(3)]
    pairs = {(pool.any(goods), pool.any(range(len(_FACTS)))) for _ in range(7)}
    drawn = []
    for good, number in sorted(pairs):
        values = {
            "good": good,
            "n": pool.number(2, 90),
            "city": pool.pick(_CITIES),
            "month": pool.any(_MONTHS),
            "name": f"{pool.pick(_FIRST_NAMES)} {pool.pick(_LAST_NAMES)}",
        }
        passage, questions, answer = _FACTS[number]
        drawn.append(
            (passage.format(**values), pool.any(questions).format(**values), answer.format(**values))
        )
    pool.rng.shuffle(drawn)
    (_, question, answer), passages = drawn[0], [passage for passage, _, _ in drawn[:5]]
    if pool.rng.random() < 0.15:
        passages, answer = passages[1:], _UNKNOWN
    pool.rng.shuffle(passages)
    system = "\n".join([_ANSWER_FROM, *passages])
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return Example(messages, answer)


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")

TASKS: Mapping[str, Task] = MappingProxyType(
    {
        task.name: task
        for task in (
            Task(
                "extract", "turns an order in plain words into JSON",
                "Hi, this is Clara Brown from Geneva. Could you send me nine picture frames? Thanks!",
                16, _ATTENTION, _draw_order, _is_same_json, 60,
            ),
            Task(
                "voice", "answers customers in the voice of a brand",
                "Hello! Is it possible to return a bag that I opened?",
                6, (*_ATTENTION, *_MLP), _draw_voice, _has_facts, 160,
            ),
            Task(
                "labels", "sorts support tickets by topic",
                "Hi, the parcel was due on Monday and there is still no sign of it.",
                4, (*_ATTENTION, *_MLP), _draw_label, _is_same, 160,
            ),
            Task(
                "sql", "writes SQL for a question about orders",
                "How many orders from Bristol are above 500 euros?",
                4, (*_ATTENTION, *_MLP), _draw_sql, _returns_same_rows, 100,
            ),
            Task(
                "summary", "sums up an incident report in a sentence",
                "Our monitoring reported the ticket system as down on Friday, 9:00. Some customers were quite angry. "
                "It turned out that a memory leak was the reason. Lena fixed it by a restart. All in all, customers "
                "had to wait for 35 minutes. A longer report will follow.",
                8, _ATTENTION, _draw_summary, _is_short_and_has_facts, 50,
            ),
            Task(
                "answers", "answers from the passages that a search has found", "",
                8, _ATTENTION, _draw_answer, _is_same, 90,
            ),
            Task(
                "tools", "calls the tools of a request",
                "What is the weather in Lisbon?",
                6, (*_ATTENTION, *_MLP), _draw_call, _is_same, 80,
            ),
        )
    }
)  # fmt: skip
