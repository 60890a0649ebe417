"""Style sheet and script of the page."""

from __future__ import annotations

STYLE = """
:root{--ink:#1d2733;--muted:#5b6672;--line:#d9dee4;--card:#fff;--back:#f4f6f8;--fault:#b3261e;
--cost:#8a5a00}
*{box-sizing:border-box}
body{margin:0;font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;color:var(--ink);
background:var(--back)}
header,main{max-width:1180px;margin:0 auto;padding:0 16px}
h1{font-size:1.5rem;margin:20px 0 0}h2{font-size:1.25rem;margin:28px 0 8px;overflow-wrap:anywhere}
h3{font-size:1.05rem;margin:20px 0 8px}
.muted{color:var(--muted);margin:0}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:8px;margin:0}
.facts div,figure,.findings li{background:var(--card);border:1px solid var(--line);
border-radius:8px}
.facts div{padding:8px 12px}dt{color:var(--muted);font-size:.8rem}
dd{margin:0;font-size:1.15rem;font-weight:600}
.findings{list-style:none;margin:0;padding:0;display:grid;gap:8px}
.findings li{display:flex;gap:16px;padding:12px;border-left:6px solid var(--cost)}
.findings li.fault{border-left-color:var(--fault)}
.findings p{margin:0;overflow-wrap:anywhere}.share{font-size:1.5rem;font-weight:700;flex:0 0 84px}
.share span{display:block;font-size:.75rem;font-weight:400;color:var(--muted)}
.cure{color:var(--muted)}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(340px,100%),1fr));gap:12px;
margin:12px 0}
figure{margin:0;padding:10px;min-width:0}.wide{grid-column:1/-1}
figcaption{font-weight:600}
.chart{width:100%;overflow:hidden}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:3px 10px 3px 0;text-align:left;border-bottom:1px solid var(--line);
white-space:nowrap}tbody th{font-weight:400}
summary{cursor:pointer;color:var(--muted);font-size:.85rem}
.hidden{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
.notes{margin:0;padding-left:20px}
@media (max-width:520px){.findings li{flex-direction:column;gap:4px}
.share{flex:none}.share span{display:inline}}
@media print{body{background:#fff;font-size:11px}figure,.findings li,tr{break-inside:avoid}
.scroll{overflow:visible}h2,h3{break-after:avoid}
table{font-size:.75rem}th,td{white-space:normal}}
"""

SCRIPT = """
(function () {
  const plots = JSON.parse(document.getElementById('charts').textContent);
  const divs = plots.map((_, number) => document.getElementById('chart' + number));
  const font = {family: 'system-ui, sans-serif', size: 12, color: '#1d2733'};
  function layoutOf(plot) {
    const layout = Object.assign({
      font: font, height: plot.height, autosize: true,
      paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
      margin: {l: 52, r: 12, t: plot.layout.updatemenus ? 44 : 12, b: 44},
      legend: {orientation: 'h', traceorder: 'normal', yanchor: 'top',
        y: -56 / (plot.height - 100)},
    }, plot.layout);
    layout.xaxis = Object.assign({gridcolor: '#e6eaee', zeroline: false}, layout.xaxis);
    layout.yaxis = Object.assign({gridcolor: '#e6eaee', zeroline: false}, layout.yaxis);
    return layout;
  }
  const drawn = plots.map((plot, number) => Plotly.newPlot(divs[number], plot.traces,
    layoutOf(plot), {responsive: true, displayModeBar: false}));
  Promise.all(drawn).then(() => { document.documentElement.dataset.drawn = drawn.length; });
  let opened = [];
  window.addEventListener('beforeprint', () => {
    opened = Array.from(document.querySelectorAll('details:not([open])'));
    opened.forEach((each) => { each.open = true; });
    divs.forEach((div) => Plotly.relayout(div, {width: Math.min(div.clientWidth, 660)}));
  });
  window.addEventListener('afterprint', () => {
    opened.forEach((each) => { each.open = false; });
    divs.forEach((div) => Plotly.relayout(div, {width: null, autosize: true}));
  });
})();
"""
