"""The report as a browser shows it: nothing is loaded, nothing complains, nothing overflows, every chart is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
import samples
import searched
from browser import Browser
from checkout_paths import CHECKOUT
from rarely import diagonal

from autoattn import report
from autoattn.cache import store
from autoattn.core.problem import Op

PHONE, PAPER, DESKTOP = 390, 688, 1440  # CSS pixels; paper is A4 without its margins
SECONDS = 2.0  # from the click to the first picture, of a report of a few problems; benchmarks/ has that of a hundred

pytestmark = pytest.mark.skipif(
    browser.chromium_path() is None, reason="needs Chromium in the PATH, or its path in AUTOATTN_CHROMIUM; found none"
)

# For each chart: its size, and how many marks and lines it has; shown ones only.
CHARTS = """[...document.querySelectorAll('figure.chart')].map(chart => {
  const svg = chart.querySelector('svg'), box = svg.getBoundingClientRect();
  const drawn = [...svg.querySelectorAll('use, path')].filter(one => {
    const size = one.getBoundingClientRect(); return size.width + size.height > 0; });
  return {name: chart.closest('div.panel, details').querySelector('h4, summary').textContent,
          width: box.width, height: box.height, marks: drawn.length};
})"""
# Elements that reach beyond the page's right edge, unless a box around them scrolls.
BEYOND = """[...document.querySelectorAll('body *')].filter(one => {
  if (one.closest('.wide, pre, svg')) return false;
  const box = one.getBoundingClientRect();
  return box.width > 0 && (box.right > document.documentElement.clientWidth + 1 || box.left < -1);
}).map(one => one.tagName + '.' + one.className + ': ' + one.textContent.slice(0, 40))"""
# The least contrast (WCAG 2.1) of any text with what is painted behind it.
CONTRAST = """(() => {
  const light = text => { const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map(part => {
    const share = part / 255; return share <= .04045 ? share / 12.92 : ((share + .055) / 1.055) ** 2.4; });
    return .2126 * r + .7152 * g + .0722 * b; };
  const behind = one => { for (; one; one = one.parentElement) {
    const fill = getComputedStyle(one).backgroundColor;
    if (fill.startsWith('rgb(')) return fill; } return 'rgb(255, 255, 255)'; };
  let least = [99, ''];
  for (const one of document.querySelectorAll('body *')) {
    if (one.closest('svg') || one.closest('.value')) continue;
    if (![...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim())) continue;
    if (!one.getClientRects().length) continue;
    const pair = [light(getComputedStyle(one).color), light(behind(one))].sort((a, b) => b - a);
    const ratio = (pair[0] + .05) / (pair[1] + .05);
    if (ratio < least[0]) least = [ratio, one.tagName + '.' + one.className + ': ' + one.textContent.slice(0, 40)];
  }
  return least;
})()"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of measured problems with their searches, of one without, and of predicted ones."""
    folder = tmp_path_factory.mktemp("cache")
    chosen = searched.problems(6)
    measured = [searched.entry_of(problem, number) for number, problem in enumerate(chosen[:4])]
    searched.folder_of(folder, measured[:3], trials=40)
    store.merge(folder, samples.H200, Op.FORWARD, [measured[3]])
    predicted = [searched.entry_of(problem, measured=False) for problem in chosen[4:]]
    searched.folder_of(folder, predicted, samples.A30, trials=20)
    return report.build(folder, folder / "out")[0]


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = browser.chromium_path()
    assert path is not None
    with Browser(path, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize(("width", "dark"), diagonal((PHONE, DESKTOP), (False, True)))
def test_the_page_loads_alone_complains_of_nothing_and_fits(
    window: Browser, page: Path, width: int, dark: bool
) -> None:
    assert window.open(page, width=width, dark=dark) < SECONDS
    window.run("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert window.complaints() == []
    assert window.requests() == [page.resolve().as_uri()]
    assert window.run("document.documentElement.scrollWidth") == width
    assert window.run(BEYOND) == []


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_every_chart_has_a_size_and_marks(window: Browser, page: Path, width: int) -> None:
    window.open(page, width=width)
    window.run("document.querySelectorAll('details').forEach(element => element.open = true)")
    chart_sizes = window.run(CHARTS)
    names = [chart["name"] for chart in chart_sizes]
    assert len(chart_sizes) == 2 + 2 * 5  # a roofline for each device, history and coordinates for each search
    assert names.count("Roofline") == 2
    for chart in chart_sizes:
        assert chart["width"] >= 240, chart
        assert chart["height"] >= 150, chart
        assert chart["marks"] >= 2, chart
    strips = window.run(
        "[...document.querySelectorAll('td.strip svg')].map(chart => chart.getBoundingClientRect().width)"
    )
    assert len(strips) == 4
    assert min(strips) > 100


def test_a_link_opens_its_card_and_all_that_it_is_folded_in(window: Browser, page: Path) -> None:
    window.open(page, width=DESKTOP)
    window.run("document.querySelector('table.summary a').click()")
    window.run("new Promise(done => setTimeout(done, 50))")
    opened = "[...document.querySelectorAll('details.card[open] .inside')].filter(one => one.checkVisibility())"
    assert window.run(f"'#' + {opened}.at(0).id === document.querySelector('table.summary a').hash")
    assert window.complaints() == []


def test_the_head_of_a_table_stays_while_its_rows_scroll(window: Browser, page: Path) -> None:
    window.open(page, width=DESKTOP, height=160)
    window.run("document.querySelector('.rows:has(table.summary)').scrollTo(0, 80)")
    place = "document.querySelector('{}').getBoundingClientRect().top"
    scrolled = "document.querySelector('.rows:has(table.summary)').scrollTop"
    assert window.run(scrolled) > 40
    head = window.run(place.format("table.summary th")) - window.run(place.format(".rows:has(table.summary)"))
    assert abs(head) < 3


@pytest.mark.exhaustive
def test_the_report_of_the_shipped_caches_fits_a_phone(window: Browser, tmp_path: Path) -> None:
    page, summary = report.build(CHECKOUT / "cache", tmp_path)
    assert window.open(page, width=PHONE) < SECONDS
    assert window.run("document.documentElement.scrollHeight") < 24_000  # pixels
    assert window.run(BEYOND) == []
    assert "is left out to keep this file small" not in page.read_text()
    assert len(summary.read_bytes()) <= report.MARKDOWN_BYTES


def test_rows_are_filtered_and_sorted_offline(window: Browser, page: Path) -> None:
    window.open(page, width=DESKTOP)
    rows = "[...document.querySelector('table.summary').tBodies[0].rows].filter(row => row.checkVisibility())"
    times = f"{rows}.map(row => parseFloat(row.querySelector('[data-label=\"Median us\"]').textContent))"
    window.run("document.querySelectorAll('table.summary th button')[2].click()")
    ascending = window.run(times)
    assert ascending == sorted(ascending)
    window.run("document.querySelectorAll('table.summary th button')[2].click()")
    assert window.run(times) == ascending[::-1]
    window.run("document.querySelector('.filter input').value = 'D64 full'")
    window.run("document.querySelector('.filter input').dispatchEvent(new Event('input'))")
    names = window.run(f"{rows}.map(row => row.cells[0].textContent)")
    assert 0 < len(names) < len(ascending)
    assert all("D64" in name and "full" in name for name in names)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_all_text_can_be_read(window: Browser, page: Path, dark: bool) -> None:
    window.open(page, width=DESKTOP, dark=dark)
    window.run("document.querySelectorAll('details').forEach(one => one.open = true)")
    ratio, where = window.run(CONTRAST)
    assert ratio >= 4.5, where  # WCAG 2.1, level AA


def test_light_and_dark_differ(window: Browser, page: Path) -> None:
    fills = []
    for dark in (False, True):
        window.open(page, width=DESKTOP, dark=dark)
        fills.append(window.run("getComputedStyle(document.body).backgroundColor"))
    assert fills[0] != fills[1]


def test_print_is_dark_on_white_and_leaves_closed_problems_out(window: Browser, page: Path) -> None:
    window.open(page, width=PAPER, dark=True, media="print")
    assert window.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert window.run("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert window.run("document.documentElement.scrollWidth") == PAPER
    window.run("document.querySelector('details.card').open = true")
    assert window.run("document.documentElement.scrollWidth") == PAPER
    hidden = "[...document.querySelectorAll('details.card:not([open])')].every(one => !one.getClientRects().length)"
    assert window.run(hidden)


def test_a_page_that_overflows_or_complains_is_seen(window: Browser, page: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    text = page.read_text(encoding="utf-8")
    broken.write_text(text.replace("<main>", '<main><img src="missing.png"><p style="width: 999px">wide</p>'))
    window.open(broken, width=PHONE)
    assert window.complaints()
    assert window.run("document.documentElement.scrollWidth") > PHONE
    assert window.run(BEYOND)
