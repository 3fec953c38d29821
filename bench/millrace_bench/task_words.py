"""The vocabulary of the generated tasks. In the shipped tokenizer a space and an adjective or noun are one token."""

ADJECTIVES = (  # noqa: SIM905 (a word a line would hide the list)
    "blue red green black white brown golden silver warm cold small large tall short wide thin old young fast "
    "slow quiet loud bright dark heavy light soft hard sweet sour clean dusty empty full happy sad brave shy "
    "wise calm round flat sharp smooth rough wild gentle proud lucky humble early late open secret simple "
    "modern ancient northern southern eastern western double single final"
).split()

NOUNS = (  # noqa: SIM905 (a word a line would hide the list)
    "fox lamp river stone bird tree house door table chair window garden bridge tower ship train horse cat dog "
    "wolf bear lion apple lemon bread cheese soup cake paper book letter pencil clock mirror button basket "
    "bottle candle carpet hammer ladder needle rope wheel engine piano violin drum flute cloud storm snow "
    "island forest desert mountain valley harbor castle market school farm road path"
).split()

NAMES = (  # noqa: SIM905 (a word a line would hide the list)
    "Alice Anna Ben Carla Daniel Emma Felix Grace Hugo Irene Jack Karin Leo Maria Nina Oscar Paula Robert Sarah "
    "Tom Uma Victor Wanda Yusuf Zoe Peter Julia Martin Laura Simon Helen David"
).split()

PETS = ("cat", "dog", "horse", "bird")
