"""Personal data by patterns: e-mail and public IP addresses, international phone numbers, card numbers, IBANs.

Names and postal addresses are not detected. Similar text that fails a check (a version number, a private address,
digits with a wrong check sum) stays.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable
from functools import cache

from mega_data.cleaning.clean_config import PiiRule
from mega_data.cleaning.rule_verdict import ChangeDocument, DropDocument
from mega_data.cleaning.text_words import AnalyzedText


def _is_card_number(number: str) -> bool:
    digits = [int(c) for c in number if c.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[-2::-2]]
    return 13 <= len(digits) <= 19 and any(digits) and (sum(digits[::-2]) + sum(doubled)) % 10 == 0


def _is_public_address(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_global
    except ValueError:
        return False


def _is_iban(number: str) -> bool:
    """Check ISO 13616: the rearranged number, letters as 10 to 35, modulo 97 is 1."""
    plain = number.replace(" ", "")
    return int("".join(str(int(c, 36)) for c in plain[4:] + plain[:4])) % 97 == 1


def _is_phone_number(number: str) -> bool:
    return 8 <= sum(map(str.isdigit, number)) <= 15  # E.164


REQUIRED_CHARACTERS = {"email": "@", "phone": "+"}  # a text without the character is not searched

KINDS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "email": (r"\b[A-Za-z0-9](?:[A-Za-z0-9._%+-]{0,62}[A-Za-z0-9_%+-])?@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24}\b", bool),
    "ip": (r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.]*\d)|(?<![\w:])(?:[0-9A-Fa-f]{1,4}:){2,7}(?::?[0-9A-Fa-f]{1,4}){1,6}(?![\w:])", _is_public_address),
    "phone": (r"(?<![\w+])\+[1-9](?:[ ().\u2011-]{0,2}\d){6,14}(?!\d)", _is_phone_number),
    "card": (r"(?<![\w.-])\d(?:[ -]?\d){12,18}(?![\w-])", _is_card_number),
    "iban": (r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b", _is_iban),
}  # fmt: skip


def apply_pii_rule(text: AnalyzedText, limits: PiiRule) -> DropDocument | ChangeDocument | None:
    """Return the text with each personal data item replaced by its kind (`<EMAIL>`), the reason to drop the document,
    or None if there is none.
    """
    found: Counter[str] = Counter()
    result = text.text
    for kind, (pattern, is_valid) in _select_patterns(limits):
        if REQUIRED_CHARACTERS.get(kind, "") not in text.text:
            continue

        def mask(match: re.Match[str], kind: str = kind, is_valid: Callable[[str], bool] = is_valid) -> str:
            if not is_valid(match[0]):
                return match[0]
            found[kind] += 1
            return f"<{kind.upper()}>"

        result = pattern.sub(mask, result)
    if not found:
        return None
    if limits.action == "drop":
        return DropDocument(" and ".join(found), ", ".join(f"{count} {kind}" for kind, count in found.items()))
    return ChangeDocument(result, dict(found))


def _select_patterns(limits: PiiRule) -> list[tuple[str, tuple[re.Pattern[str], Callable[[str], bool]]]]:
    chosen = {kind: KINDS[kind] for kind in limits.kinds} | {
        name: (pattern, bool) for name, pattern in limits.patterns.items()
    }
    return [(kind, (_compile_pattern(pattern), is_valid)) for kind, (pattern, is_valid) in chosen.items()]


@cache
def _compile_pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
