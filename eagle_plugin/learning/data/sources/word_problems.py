"""Made-up arithmetic word problems: templates filled with random names and numbers, the same on every machine."""

from __future__ import annotations

import random

NAMES = (
    "Ada", "Ben", "Chloe", "Dmitri", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jamal",
    "Kira", "Liam", "Mina", "Noah", "Olga", "Priya", "Quinn", "Rosa", "Sam", "Tara",
)  # fmt: skip
THINGS = (
    "apples", "pencils", "stickers", "books", "marbles", "eggs", "cupcakes",
    "bottles", "tickets", "shells", "coins", "cards", "flowers", "bricks",
)  # fmt: skip
PLACES = (
    "a bakery", "a farm", "a school", "a library", "a factory",
    "a zoo", "a hotel", "a garden", "a bookshop", "a bus station",
)  # fmt: skip
WORD_PROBLEMS = (
    "{n} has {a} {t}. {m} gives {n} {b} more, and then {n} loses {c} of them. How many {t} does {n} have now?",
    "{p} sells {a} {t} on Monday and twice as many on Tuesday. If each of them costs ${c}, how much money is earned?",
    "{n} reads {a} pages a day for {b} days. The book has {d} pages. How many pages are left to read?",
    "A box holds {a} {t}. {n} fills {b} boxes and has {c} {t} left over. How many {t} were there at the start?",
    "{n} earns ${a} an hour and works {b} hours a day, {c} days a week. How much does {n} earn in {e} weeks?",
    "A train travels at {f} miles per hour for {e} hours and then at {g} miles per hour for {c} hours. "
    "How far does it go?",
    "{n} buys {a} {t} for ${c} each and pays with a ${h} bill. How much change does {n} get?",
    "{p} has {d} {t}. A quarter of them are sold in the morning and {b} in the afternoon. How many are left?",
    "{n} is {a} years old. {m} is {e} times as old as {n}. How old will {m} be in {b} years?",
    "{n} and {m} share {d} {t} so that {n} gets {b} more than {m}. How many {t} does each of them get?",
    "A rectangular garden is {a} meters long and {b} meters wide. A fence costs ${c} per meter. "
    "What does the fence cost?",
    "{n} saves ${b} every week. After {a} weeks {n} spends ${h} on a gift. How much money does {n} have left?",
    "There are {f} students in {p}. {g}% of them play football and half of the rest play chess. How many play chess?",
    "It takes {n} {b} minutes to make one cake. How many hours does it take to make {d} cakes?",
    "{n} walks {e} miles to work and back, {c} days a week. How many miles does {n} walk in {a} weeks?",
    "{p} had {h} {t}. It gave {b} {t} to each of {c} visitors. How many {t} remain?",
    "A recipe for {e} people needs {b} eggs. How many eggs does {n} need for {d} people?",
    "{n} runs {a} laps of {f} meters in the morning and {b} laps in the evening. How many meters is that in total?",
    "A shirt costs ${h} and is sold with a discount of {g}%. {n} buys {e} of them. How much does {n} pay?",
    "{n} picks {a} {t} and {m} picks {e} times as many. They put them into bags of {c}. How many bags do they need?",
)


def word_problem(number: int) -> str:
    """Problem number `number`."""
    rng = random.Random(number)
    name, other = rng.sample(NAMES, 2)
    thing = rng.choice(THINGS)
    rng.random()  # not used, but without it all later draws, and so the problems of earlier data, would change
    place = rng.choice(PLACES).capitalize()
    return WORD_PROBLEMS[number % len(WORD_PROBLEMS)].format(
        n=name,
        m=other,
        t=thing,
        p=place,
        a=rng.randint(3, 24),
        b=rng.randint(2, 15),
        c=rng.randint(2, 9),
        d=20 * rng.randint(2, 15),
        e=rng.randint(2, 6),
        f=10 * rng.randint(3, 12),
        g=10 * rng.randint(1, 8),
        h=10 * rng.randint(3, 20),
    )
