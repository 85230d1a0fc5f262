"""Ten questions that people have about their runs: two clicks after the first page, the answer is there."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pytest

from tests.ui.site import Site, serving_after_training

MOST_CLICKS: Final = 2


@dataclass
class Visit:
    """Somebody at the first page. Typing and Enter are no clicks."""

    page: Any
    clicks: int = 0

    def follow(self, name: str) -> None:
        """Clicks on a link."""
        self._click(self.page.get_by_role("link", name=name, exact=True))

    def press(self, name: str) -> None:
        """Clicks on a button."""
        self._click(self.page.get_by_role("button", name=name, exact=True))

    def unfold(self, summary: str) -> None:
        self._click(self.page.locator("summary", has_text=summary))

    def open_head(self) -> None:
        self._click(self.page.locator("dt:text-is('Head') + dd a"))

    def write(self, label: str, text: str) -> None:
        """Types into a field, and Enter."""
        self.page.get_by_label(label).fill(text)
        self.page.keyboard.press("Enter")

    def _click(self, found: Any) -> None:
        self.clicks += 1
        found.first.click()


class Question:
    """What somebody does, a step a method; and where the answer is."""

    def __init__(self, answer: str, *steps: Callable[[Visit], object]) -> None:
        self.answer, self.steps = answer, steps


QUESTIONS: Final = {
    "which run has stopped saving?": Question("tr:has-text('runs/bert') >> td.bad:has-text('late')"),
    "how low is the loss of a run, and is it still falling?": Question(
        "[role=img][aria-label^='val_loss: '][aria-label*='lowest']", lambda visit: visit.follow("runs/gpt")
    ),
    "why was a run set back?": Question(
        "td:has-text('loss went to NaN after step 270')",
        lambda visit: visit.follow("runs/gpt"),
        lambda visit: visit.unfold("What happened"),
    ),
    "which snapshot is the best?": Question(
        "#found tbody tr:first-child th:has-text('runs/gpt')",
        lambda visit: visit.follow("Find"),
        lambda visit: visit.write("Order", "val_loss"),
    ),
    "which of two runs is better?": Question(
        "#overlays [role=img][aria-label^='val_loss: '][aria-label*='runs/gpt-slow']",
        lambda visit: visit.follow("runs/gpt"),
        lambda visit: visit.follow("Draw over other runs"),
        lambda visit: visit.write("Add a branch", "runs/gpt-slow"),
    ),
    "what did the last save change?": Question(
        "#differences th:has-text('model.head.weight')",
        lambda visit: visit.follow("runs/gpt"),
        lambda visit: visit.press("Compare old and new"),
    ),
    "who removed what, and when?": Question("tr:has-text('cron@node1:77') >> text=gc", lambda visit: visit.follow("Activity")),
    "what uses the space, and what can be freed?": Question(
        "#measured:has(:text('What gc can free')) tr:has-text('runs/gpt-slow')",
        lambda visit: visit.follow("Space"),
        lambda visit: visit.press("Measure"),
    ),
    "is the store intact?": Question(
        "text=No errors in what was checked.", lambda visit: visit.follow("Health"), lambda visit: visit.press("Check")
    ),
    "how is the newest snapshot loaded?": Question(
        "pre:has-text('store.checkout(')", lambda visit: visit.follow("runs/gpt"), lambda visit: visit.open_head()
    ),
}


@pytest.fixture(scope="module")
def served(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with serving_after_training(chromium, tmp_path_factory.mktemp("site")) as site:
        yield site


@pytest.mark.slow
@pytest.mark.parametrize("asked", QUESTIONS)
def test_the_answer_is_two_clicks_away(served: Site, asked: str) -> None:
    question = QUESTIONS[asked]
    page = served.new_page(reduced_motion="reduce")
    visit = Visit(page)
    for step in question.steps:
        step(visit)
    page.locator(question.answer).first.wait_for()
    page.context.close()
    assert visit.clicks <= MOST_CLICKS
    assert not served.problems
