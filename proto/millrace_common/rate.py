"""The recent speed of repeated work, such as the bytes per second of reads. Pure."""

FADE = 0.9  # of what is remembered, with every further piece of work


class Rate:
    """Large pieces count for more, because the fixed costs of small ones hide the speed."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        if amount > 0 and seconds > 0:
            self._amount = FADE * self._amount + amount * amount
            self._seconds = FADE * self._seconds + amount * seconds

    @property
    def per_s(self) -> float:
        """0: nothing has been measured."""
        return self._amount / self._seconds if self._seconds else 0.0
