"""What the device's page table must be told. The table itself lives on the device, one line per slot. Never jax.

    slot   0  | 7  3  12 .. |     page of position p is table[slot, p // page_size]
           1  | .  .   . .. |     entries past a sequence's pages are never read: whatever they hold may stay
           2  | 7  3   5  9 |     two slots may share the pages of an equal beginning

A step sends only the entries that changed since the last one: (slot, column, page).
"""


class PageTableWrites:
    """Entries of the page table that changed since the last step."""

    def __init__(self) -> None:
        self._writes: list[tuple[int, int, int]] = []

    def put(self, slot: int, column: int, pages: list[int]) -> None:
        """`pages` are the slot's entries from `column` on."""
        for page in pages:
            self._writes.append((slot, column, page))
            column += 1

    def drop(self, slot: int) -> None:
        """The slot is empty again: what was not sent yet need not be."""
        self._writes = [write for write in self._writes if write[0] != slot]

    def take(self) -> list[tuple[int, int, int]]:
        """The entries to send with this step."""
        writes, self._writes = self._writes, []
        return writes
