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
