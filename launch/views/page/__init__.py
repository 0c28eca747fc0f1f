"""The page of a run for a browser: one server or one file. It only reads.

server: `aedit view`: the server, who may read, and the events that update the page. Begin there.
contents: what is on the page, as plain values; histories: counters of nodes by bins of time.
html: the page as text. `static`: its script and style, and uPlot, which draws the charts, with its licence.
"""
