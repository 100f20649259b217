"""The work that following a launch script may take, so that every script comes to an end."""

from __future__ import annotations

from dataclasses import dataclass

from mega_common.errors import ConfigError

WORK = 10_000_000  # characters that are made or read; launch scripts in use take up to some 100,000
WORD = 16  # characters that a word costs besides its own
EXPRESSION = 200  # characters that a variable in arithmetic costs, which is an expression itself
PARSED = 10  # characters that a parsed one costs


@dataclass
class Budget:
    """Counter of the characters that following a script makes and reads.

    Attributes:
        left: characters that may still be made.
    """

    left: int = WORK

    def spend(self, characters: int) -> None:
        """Take characters off before they are made.

        Raises:
            ConfigError: when none are left.
        """
        self.left -= characters
        if self.left < 0:
            raise ConfigError(
                f"the launch script makes more than {WORK:,} characters of text and is not followed further",
                hint="does a loop or an expansion in it not end? give the training command alone",
            )
