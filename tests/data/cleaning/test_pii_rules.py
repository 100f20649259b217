from __future__ import annotations

import pytest

from mega_data.cleaning.clean_config import PiiRule
from mega_data.cleaning.pii_rules import apply_pii_rule
from mega_data.cleaning.rule_verdict import ChangeDocument, DropDocument
from mega_data.cleaning.text_words import AnalyzedText

ALL = PiiRule(kinds=["email", "ip", "phone", "card", "iban"])


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("write to Jo.Doe+x@mail.example.com.", "write to <EMAIL>."),
        ("from 8.8.8.8:53 and 2001:4860:4860::8888", "from <IP>:53 and <IP>"),
        ("call +49 (30) 1234-5678 or", "call <PHONE> or"),
        ("card 4111 1111 1111 1111!", "card <CARD>!"),
        ("pay DE89 3704 0044 0532 0130 00 now", "pay <IBAN> now"),
    ],
)
def test_what_is_found(text: str, masked: str) -> None:
    found = apply_pii_rule(AnalyzedText(text), ALL)
    assert (found.text if isinstance(found, ChangeDocument) else text) == masked


@pytest.mark.parametrize(
    "text",
    ["192.168.0.1 and 127.0.0.1", "version 1.2.3.4.5", "999.1.1.1", "card 4111 1111 1111 1112", "user@localhost",
     "1 + 1234567 = 1234568", "DE00 3704 0044 0532 0130 00", "at 12:30:45", "std::vector<int>::size", "0000000000000000"],
)  # fmt: skip
def test_what_looks_alike_stays(text: str) -> None:
    assert apply_pii_rule(AnalyzedText(text), ALL) is None


def test_a_document_can_be_dropped_instead() -> None:
    found = apply_pii_rule(AnalyzedText("a@example.com b@example.com 8.8.4.4"), PiiRule(action="drop"))
    assert found == DropDocument("email and ip", "2 email, 1 ip")


def test_patterns_of_ones_own() -> None:
    found = apply_pii_rule(AnalyzedText("number 123-45-6789"), PiiRule(patterns={"ssn": r"\b\d{3}-\d\d-\d{4}\b"}))
    assert found == ChangeDocument("number <SSN>", {"ssn": 1})


def test_time_is_linear_in_the_text() -> None:
    text = AnalyzedText("a" * 200_000 + "." * 50_000 + "1" * 50_000 + " +1" * 50_000 + "@")
    assert apply_pii_rule(text, ALL) is None
