"""What of an HTML page becomes text."""

from millrace_training.corpus import SOURCES, documents

LONG = "This paragraph is long enough to be kept, since it has more than forty characters."
PAGE = f"""<html><head><title>Dropped</title></head><body><h1>2.3. Opening several files</h1><p>{LONG}</p>
<h2>Lonely heading</h2><h2>Chapter 4. Closing</h2><pre>code = dropped()</pre><ul><li>An item with a <b>bold</b> word
is kept in one piece, too.</li></ul><p>Too short.</p><p>A table of contents entry without any full stop at its end</p>
<table><tr><td><p>{LONG} In a table.</p></td></tr></table><p>{LONG}</p>{{extra}}</body></html>"""


def test_pages_become_paragraphs_without_repetition(tmp_path):
    folder = tmp_path / "usr/share/doc/sqlite3"
    folder.mkdir(parents=True)
    extra = "".join(f"<p>Filler sentence number {word} makes the page long enough.</p>" for word in "abcdefghij")
    (folder / "a.html").write_text(PAGE.replace("{extra}", extra))
    (folder / "b.html").write_text(PAGE.replace("{extra}", ""))
    assert "sqlite3-doc" in SOURCES
    ((path, text),) = documents(tmp_path)  # b.html has nothing new
    assert path == "usr/share/doc/sqlite3/a.html"
    assert text.split("\n\n")[:4] == [
        "Opening several files",
        LONG,
        "Closing",
        "An item with a bold word is kept in one piece, too.",
    ]
    assert text.count(LONG) == 1
    assert all(word not in text for word in ("dropped", "Dropped", "Lonely", "Too short", "table"))
