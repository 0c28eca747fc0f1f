"""Pictures of the views of a page, for docs/img: PYTHONPATH=tests python -m kit.pictures RUN [VIEW ...].

Without names of views it takes all that the run has, and `phone`, the first one on a phone at night.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from aedit.launch.records import read_rollouts, read_run
from aedit.launch.views.page.contents import contents
from aedit.launch.views.page.html import MOST_ROLLOUTS, file_page
from kit.browser import browser

PLACE = Path(__file__).parent.parent.parent / "docs" / "img"


def main(run, *views):
    page = contents(read_run(Path(run)))
    known = [*(part.name for part in page.sections), "rollouts", "phone"]
    with TemporaryDirectory() as folder, browser(Path(folder) / "profile") as chromium:
        file = Path(folder) / "page.html"
        file.write_text(file_page(page, read_rollouts(Path(run), MOST_ROLLOUTS)))
        for name in views or known:
            chromium.look(360 if name == "phone" else 1000, dark=name == "phone")
            chromium.open("about:blank")
            chromium.open(file.as_uri())
            if not (name == "phone" or chromium.value(f"document.getElementById('{name}') !== null")):
                continue
            chromium.value(
                "document.querySelectorAll('details.rollout')"
                ".forEach((each, i) => { each.open = i === 0; each.hidden = i > 4; })"
            )
            place = "#nodes" if name == "phone" else f"#{name}"
            chromium.picture(PLACE / f"page-{name}.webp", place, quality=60)
            print(PLACE / f"page-{name}.webp")


if __name__ == "__main__":
    main(*sys.argv[1:])
