"""What the demo's engines are asked: one long system prompt, and a question each."""

_TOPICS = (
    "opening hours",
    "lost library cards",
    "reading rooms",
    "late returns",
    "picture books",
    "old newspapers",
    "printing and copying",
    "quiet hours",
    "school visits",
    "maps and atlases",
    "music scores",
    "interlibrary loans",
    "wheelchair access",
    "reservations",
    "donated books",
    "the local archive",
    "audio books",
    "language courses",
    "the children's corner",
    "lockers",
)
_MANNERS = (
    "answer in two short sentences and name the desk that can help further",
    "say first what is free of charge, then what costs money",
    "ask one question back if the reader did not say for whom it is",
    "give the rule, then the one exception that readers ask about most",
    "be brief, friendly and concrete, and never promise what only a librarian can decide",
)

SYSTEM = "You are the assistant of a town library. Follow these house rules.\n" + "\n".join(
    f"{number}. When a reader asks about {_TOPICS[number % len(_TOPICS)]}, {_MANNERS[number % len(_MANNERS)]}; "
    f"if it is busy, offer a call back within {number % 7 + 2} hours."
    for number in range(1, 31)
)
"""Shared by all engines; about 1,100 tokens of SmolLM2's."""

QUESTIONS = {
    "A": "Where do I return an audio book on a Sunday?",
    "B": "My library card is gone. What now?",
    "C": "Can a school class visit the local archive?",
    "D": "Tell me a story about a map that nobody could read.",
}


def conversation(question: str) -> list[dict[str, str]]:
    """A question behind the system prompt, as messages of a chat."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
