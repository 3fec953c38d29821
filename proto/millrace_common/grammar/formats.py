"""Formats of strings as patterns. They allow nothing that a checker of formats refuses."""

_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # 0001 to 9999
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = rf"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H = r"[0-9A-Fa-f]{1,4}"
_IPV6 = "|".join(
    (
        rf"(?:{_H}:){{7}}{_H}",
        *(rf"(?:{_H}:){{{before}}}(?::{_H}){{1,{7 - before}}}" for before in range(1, 7)),
        rf":(?::{_H}){{1,7}}",
        rf"(?:{_H}:){{1,7}}:",
        "::",
    )
)
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9]|-[A-Za-z0-9])*"  # never two hyphens: "xn--" begins a name in another script
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_UNIT = r"[0-9]+"
_CLOCK = rf"T(?:{_UNIT}H(?:{_UNIT}M(?:{_UNIT}S)?)?|{_UNIT}M(?:{_UNIT}S)?|{_UNIT}S)"
_CALENDAR = rf"(?:{_UNIT}Y(?:{_UNIT}M(?:{_UNIT}D)?)?|{_UNIT}M(?:{_UNIT}D)?|{_UNIT}D)"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_PCT = r"%[0-9A-Fa-f]{2}"
_PCHAR = rf"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|{_PCT})"
_USER = rf"(?:(?:[A-Za-z0-9._~!$&'()*+,;=:-]|{_PCT})*@)?"
_NAME = rf"(?:[A-Za-z0-9._~!$&'()*+,;=-]|{_PCT})*"
_AUTHORITY = rf"{_USER}(?:\[(?:{_IPV6})\]|{_NAME})(?::[0-9]*)?"
_HIER = rf"(?://{_AUTHORITY}(?:/{_PCHAR}*)*|/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?|{_PCHAR}+(?:/{_PCHAR}*)*|)"
_MORE = rf"(?:{_PCHAR}|[/?])*"

PATTERNS = {
    name: rf"^(?:{pattern})$"
    for name, pattern in {
        "date": _DATE,
        "time": _TIME,
        "date-time": rf"{_DATE}[Tt]{_TIME}",
        "duration": rf"P(?:{_CALENDAR}(?:{_CLOCK})?|{_CLOCK}|{_UNIT}W)",
        "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}",
        "hostname": rf"{_HOST}",
        "ipv4": _IPV4,
        "ipv6": _IPV6,
        "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:{_HIER}(?:\?{_MORE})?(?:#{_MORE})?",
        "uuid": r"[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}",
    }.items()
}
LENGTHS = {"hostname": 63}  # shorter than its longest label may be, and so than the whole name
REFUSED = frozenset(
    [
        "idn-email",
        "idn-hostname",
        "iri",
        "iri-reference",
        "json-pointer",
        "regex",
        "relative-json-pointer",
        "uri-reference",
        "uri-template",
    ]
)  # the standard defines them, and nothing here enforces them; others have no definition
