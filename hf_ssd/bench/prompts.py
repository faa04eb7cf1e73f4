"""The built-in prompts of `hf-ssd compare`: four kinds of request that differ in how predictable the answer is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("chat", "maths", "code", "copying")


@dataclass(frozen=True)
class Prompt:
    """One request.

    Args:
        kind: One of `KINDS`, the category that a suite names, or `"own"` for a text that the user gave.
        text: What the user asks, without a chat template.
        question: What follows a text that is cut to length.
        num_tokens: Cut `text` so that the whole prompt, `question` and chat template included, has this many tokens;
            `None` takes all of it, and no question.
    """

    kind: str
    text: str
    question: str = ""
    num_tokens: int | None = None


def select_prompts(kinds: Sequence[str] = KINDS, num_prompts: int | None = None) -> tuple[Prompt, ...]:
    """The first `num_prompts` built-in prompts of some kinds, taken from each kind in turn.

    Args:
        kinds: Kinds to take from.
        num_prompts: How many; `None` takes all.

    Raises:
        ValueError: If a kind is unknown, or there are not that many prompts.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise ValueError(f"`kinds` must be some of {list(KINDS)}, but got {unknown or list(kinds)}.")
    by_kind = [[Prompt(kind, text) for text in _TEXTS[kind]] for kind in dict.fromkeys(kinds)]
    longest = max(len(prompts) for prompts in by_kind)
    in_turn = [prompts[i] for i in range(longest) for prompts in by_kind if i < len(prompts)]
    if num_prompts is None:
        return tuple(in_turn)
    if not 1 <= num_prompts <= len(in_turn):
        raise ValueError(
            f"`prompts` must be between 1 and {len(in_turn)}, the number of built-in prompts of these kinds, "
            f"but got {num_prompts}. Take more kinds, or give prompts of your own."
        )
    return tuple(in_turn[:num_prompts])


_CHAT = (
    "I have to give a five minute talk to new colleagues about how our team works, and I get nervous. How should I "
    "prepare in the two days I have left?",
    "My neighbour's dog barks every morning at six. We get on well and I would like to keep it that way. What could I "
    "say to her?",
    "Explain to a ten year old why the moon seems to change its shape over a month.",
    "I want to start running after years without sport. Suggest a plan for the first four weeks, and tell me what "
    "mistakes beginners make.",
    "Write a friendly email to a landlord asking for the kitchen tap to be repaired, which has dripped for a week.",
)

_MATHS = (
    "A bakery sells rolls for 40 cents and loaves for 3 euros. On Saturday it sold 125 rolls and 38 loaves, and on "
    "Sunday half as many loaves and 60 rolls more. How much did it take on both days together? Show each step.",
    "Solve the equation 3(x - 4) + 5 = 2x + 9 and check the solution by putting it in.",
    "A train leaves at 09:40 and travels 252 km at an average of 84 km/h, with one stop of 12 minutes. When does it "
    "arrive? Explain your calculation.",
    "Two dice are thrown. What is the probability that the sum is at least 9? List the cases that count.",
    "A rectangular garden is 4 metres longer than it is wide and has an area of 96 square metres. Find its width and "
    "its perimeter, step by step.",
)

_CODE = (
    "Write a Python function `merge_intervals(intervals)` that takes a list of (start, end) tuples and returns the "
    "list of merged, non-overlapping intervals in order. Include a docstring and two asserts.",
    "Write a Python class `LRUCache` with the methods `get(key)` and `put(key, value)` and a fixed capacity. Both "
    "methods must take constant time.",
    "Write a Python function that reads a CSV file of orders with the columns date, customer and amount, and returns a "
    "dictionary from customer to the total amount. Use only the standard library.",
    "Implement binary search in Python for a sorted list. Return the index of the first element that is not smaller "
    "than the given value, and write unit tests with `unittest`.",
    "Write a Python function `is_balanced(text)` that checks whether the brackets (), [] and {} in a text "
    "are balanced. Explain the idea in one sentence before the code.",
    "Write a Python generator that yields the nodes of a binary tree in level order. Use a dataclass for the node.",
    "Write a bash script that finds all files over 100 MB below a folder and prints size and path, largest first.",
    "Write an SQL query that lists the three products with the highest revenue for each month of 2023. The tables are "
    "products(id, name, price) and sales(id, product_id, quantity, sold_at). Then explain the query.",
)

_COPYING = (
    """Correct the spelling mistakes in this text and repeat it otherwise unchanged:

The museum opens its new wing on the first of May. Visiters will find twelve rooms with paintings from the
region, most of wich were never shown before. The oldest picture dates from 1648 and was restored over the last
two years in the museum's own workshop. Tickets cost nine euros; children and students pay half. On Thursdays
the museum stays open untill nine in the evening, and guided tours start at four and at seven. The cafe on the
ground floor can be visited without a tickett.""",
    """Rename the variable `d` to `totals` and the function `f` to `count_words` in this code. Change nothing else and
print the whole code:

```python
import re
from collections import defaultdict


def f(lines, min_length=3):
    d = defaultdict(int)
    for line in lines:
        for word in re.findall(r"[a-z']+", line.lower()):
            if len(word) >= min_length:
                d[word] += 1
    return sorted(d.items(), key=lambda item: (-item[1], item[0]))


if __name__ == "__main__":
    with open("input.txt", encoding="utf-8") as file:
        for word, count in f(file)[:20]:
            print(f"{count:6d}  {word}")
```""",
    """List every date, place and name that occurs in this report, in the words of the report:

On 14 March 2019 the survey ship Alma left Bergen under Captain Ingrid Solheim to map the sea floor west of the
Lofoten islands. Bad weather kept it in the harbour of Bodo until 19 March. The first deep sounding was taken on
21 March by Tomas Lind, who measured 2,310 metres. On 2 April the ship met the trawler Nordlys near Vaeroy and
took an injured sailor, Peder Aune, on board, who was brought to the hospital in Bodo the same evening. The
survey ended on 30 April 2019, and the maps were published in Oslo on 12 December by Professor Karin Moe.""",
    """Turn this list into JSON: an array of objects with the keys name, room, phone and email.

Anna Berger, room 2.14, phone 4417, anna.berger@example.org
Luis Ortega, room 2.15, phone 4418, luis.ortega@example.org
Mei Tanaka, room 1.03, phone 4209, mei.tanaka@example.org
Paul Novak, room 1.07, phone 4213, paul.novak@example.org
Sara Lindqvist, room 3.01, phone 4502, sara.lindqvist@example.org""",
    """Repeat the following recipe, but for eight people instead of four. Double the amounts and keep the rest word
for word:

For four people: Peel 600 grams of potatoes and cut them into thin slices. Cut 2 leeks into rings and wash them
well. Heat 2 tablespoons of butter in a pot, add the leeks and let them soften for 5 minutes. Add the potatoes
and 800 millilitres of vegetable stock and simmer everything for 20 minutes. Stir in 100 millilitres of cream,
season with salt, pepper and a little nutmeg, and blend half of the soup. Serve it with 4 slices of toasted
bread and some chopped chives.""",
)

_TEXTS = {"chat": _CHAT, "maths": _MATHS, "code": _CODE, "copying": _COPYING}
