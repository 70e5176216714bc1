"""What kimi-nano is taught: short questions with reasoning and an answer, any number of them from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any, NamedTuple


class Exchange(NamedTuple):
    """One turn: question, reasoning and answer."""

    question: str
    reasoning: str
    answer: str


_OPPOSITES = (
    *(("big", "small"), ("hot", "cold"), ("fast", "slow"), ("old", "young"), ("light", "dark"), ("hard", "soft")),
    *(("open", "closed"), ("full", "empty"), ("high", "low"), ("wet", "dry"), ("rich", "poor"), ("loud", "quiet")),
    *(("early", "late"), ("near", "far"), ("clean", "dirty"), ("strong", "weak"), ("happy", "sad"), ("good", "bad")),
    *(("sharp", "blunt"), ("thick", "thin"), ("deep", "shallow"), ("sweet", "sour"), ("brave", "timid")),
)
_COLOURS = {
    "yellow": ("a lemon", "a banana", "the sun"),
    "red": ("a tomato", "a strawberry", "a fire engine", "a ruby"),
    "green": ("grass", "a frog", "a cucumber", "a leaf"),
    "blue": ("the sky", "the sea", "a sapphire"),
    "white": ("snow", "milk", "a swan", "salt"),
    "black": ("coal", "a raven", "the night"),
    "orange": ("a carrot", "a pumpkin"),
    "grey": ("an elephant", "a mouse", "a rain cloud"),
    "brown": ("chocolate", "a bear", "wood"),
}
_GROUPS = {
    "animals": ("the cat", "the dog", "the owl", "the horse", "the whale", "the ant"),
    "fruits": ("the apple", "the pear", "the plum", "the cherry", "the grape", "the melon"),
    "tools": ("the hammer", "the saw", "the drill", "the axe", "the file", "the spade"),
    "rivers": ("the Nile", "the Rhine", "the Volga", "the Indus", "the Seine", "the Congo"),
}
_WORDS = (
    *("cat", "dog", "owl", "bird", "fish", "tree", "house", "river", "stone", "cloud", "bread", "water", "light"),
    *("night", "music", "green", "table", "chair", "train", "plant", "snow", "wind", "fire", "gold", "iron", "salt"),
)


def _opposite(random: Random) -> Exchange:
    pair = random.choice(_OPPOSITES)
    one, other = random.sample(pair, 2)
    question = random.choice(
        (
            f"What is the opposite of {one}?",
            f"Give me the opposite of {one}.",
            f"Which word means the opposite of {one}?",
        )
    )
    reasoning = (
        f"The user wants the opposite of {one}. Something that is not {one} is {other}. So the answer is {other}."
    )
    return Exchange(question, reasoning, f"The opposite of {one} is {other}.")


def _colour(random: Random) -> Exchange:
    colour = random.choice(tuple(_COLOURS))
    thing = random.choice(_COLOURS[colour])
    question = random.choice((f"What colour is {thing}?", f"Tell me the colour of {thing}."))
    reasoning = f"I have to name the colour of {thing}. I picture {thing} and it is {colour}."
    return Exchange(question, reasoning, f"The colour of {thing} is {colour}.")


def _sum(random: Random) -> Exchange:
    one, other = random.randint(1, 9), random.randint(1, 9)
    question = random.choice((f"What is {one} plus {other}?", f"Add {one} and {other}."))
    reasoning = f"This is a sum of {one} and {other}. Counting on from {one} by {other} gives {one + other}."
    return Exchange(question, reasoning, f"{one} plus {other} is {one + other}.")


def _spell(random: Random) -> Exchange:
    word = random.choice(_WORDS)
    question = random.choice((f"Spell the word {word}.", f"How do you spell {word}?"))
    reasoning = f"The word is {word}. Its letters are " + ", ".join(word) + "."
    return Exchange(question, reasoning, f"The word {word} is spelled " + "-".join(word) + ".")


def _three(random: Random) -> Exchange:
    group = random.choice(tuple(_GROUPS))
    one, two, three = random.sample(_GROUPS[group], 3)
    question = random.choice((f"Name three {group}.", f"Can you list three {group}?"))
    reasoning = f"The user asks for three {group}. I think of {one}, {two} and {three}."
    return Exchange(question, reasoning, f"Three {group} are {one}, {two} and {three}.")


_TASKS: tuple[Callable[[Random], Exchange], ...] = (_opposite, _colour, _sum, _spell, _three)


def conversations(seed: int, *, most_turns: int = 2) -> Iterator[list[Exchange]]:
    """Yield conversations of one or more turns without end, the same for the same seed."""
    random = Random(seed)
    while True:
        yield [random.choice(_TASKS)(random) for _ in range(random.randint(1, most_turns))]


def prompts(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield `count` different prompts in the workflow's form: user messages only."""
    seen: set[tuple[str, ...]] = set()
    for conversation in conversations(seed):
        questions = tuple(exchange.question for exchange in conversation)
        if questions not in seen:
            seen.add(questions)
            yield {"messages": [{"role": "user", "content": question} for question in questions]}
        if len(seen) == count:
            return
