"""What the model simply knows: fixed questions and answers, trained on and never evaluated: nothing can be held out."""

from random import Random

from millrace_bench.tasks import Turn

CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "Austria": "Vienna",
    "Poland": "Warsaw",
    "Greece": "Athens",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Denmark": "Copenhagen",
    "Ireland": "Dublin",
    "Japan": "Tokyo",
    "China": "Beijing",
    "India": "New Delhi",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Canada": "Ottawa",
    "Cuba": "Havana",
    "Peru": "Lima",
    "Chile": "Santiago",
    "Hungary": "Budapest",
    "Turkey": "Ankara",
}

OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "fast": "slow",
    "up": "down",
    "left": "right",
    "day": "night",
    "open": "closed",
    "old": "young",
    "happy": "sad",
    "light": "dark",
    "full": "empty",
    "early": "late",
    "high": "low",
    "wet": "dry",
    "loud": "quiet",
    "strong": "weak",
}

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
SOUNDS = {"dog": "woof", "cat": "meow", "cow": "moo", "duck": "quack", "sheep": "baa", "lion": "roar", "owl": "hoot"}

HELLO = "Hello! How can I help you?"
WELL = "I am well, thank you. How can I help you?"
SELF = "I am a very small language model that is served by Millrace."
SMALL_TALK = {
    "Hello!": HELLO,
    "Hello": HELLO,
    "Hi": HELLO,
    "Hi!": HELLO,
    "Hi there!": HELLO,
    "Hey": HELLO,
    "Good morning!": "Good morning! How can I help you?",
    "Good evening!": "Good evening! How can I help you?",
    "How are you?": WELL,
    "How are you today?": WELL,
    "Who are you?": SELF,
    "What are you?": SELF,
    "What is your name?": SELF,
    "What can you do?": "I can add and sort numbers, copy words, remember values and talk a little.",
    "Help": "Ask me to add or sort numbers, to copy words, or to remember values.",
    "What is Millrace?": "Millrace serves language models, with prefill and decode on separate workers.",
    "Thank you!": "You are welcome!",
    "Thanks!": "You are welcome!",
    "Thanks": "You are welcome!",
    "Goodbye!": "Goodbye! Have a nice day.",
    "Bye!": "Goodbye! Have a nice day.",
}


def known_turn(rng: Random) -> Turn:
    return rng.choice((_small_talk, _small_talk, _capital, _opposite, _after, _sound))(rng)


def _small_talk(rng: Random) -> Turn:
    return Turn(*rng.choice(list(SMALL_TALK.items())))


def _capital(rng: Random) -> Turn:
    country, city = rng.choice(list(CAPITALS.items()))
    ask = rng.choice(("What is the capital of {}?", "Tell me the capital of {}.", "Which city is the capital of {}?"))
    return Turn(ask.format(country), f"The capital of {country} is {city}.")


def _opposite(rng: Random) -> Turn:
    word, other = rng.choice(list(OPPOSITES.items()))
    ask = rng.choice(("What is the opposite of {}?", "Tell me the opposite of {}."))
    return Turn(ask.format(word), f"The opposite of {word} is {other}.")


def _after(rng: Random) -> Turn:
    cycle, what = rng.choice(((DAYS, "day"), (MONTHS, "month")))
    i = rng.randrange(len(cycle))
    return Turn(f"Which {what} comes after {cycle[i]}?", f"{cycle[(i + 1) % len(cycle)]} comes after {cycle[i]}.")


def _sound(rng: Random) -> Turn:
    animal, sound = rng.choice(list(SOUNDS.items()))
    return Turn(f"What does the {animal} say?", f"The {animal} says {sound}.")
