// The charts of a page, on canvases: what the queues do, and what ranks hold, over one time axis.
//
// Drag to move, Ctrl (or Cmd) and the wheel to zoom, Shift and drag to choose a stretch; arrows, + and − and 0 do the
// same.  For scripts: actorflow.charts.list(), .show(start, end), .reset() and .place(name, actor).
actorflow.charts = (() => {
  const {axis, charts: given} = JSON.parse(document.getElementById('charts').textContent);
  const PIXELS = 25;  // of a row of height 1
  const TOP = 6, BOTTOM = 34, RIGHT = 14;
  const MEMORY = 220;  // pixels of the height of a memory chart's plot
  const SHORTEST = 1e-4;  // milliseconds that can fill a chart
  const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif';
  const UNITS = [['GiB', 2 ** 30], ['MiB', 2 ** 20], ['KiB', 2 ** 10], ['bytes', 1]];
  const view = {start: axis.first[0], end: axis.first[1]};
  let chosen = null;

  function make(tag, attributes = {}, ...children) {
    const found = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
    found.append(...children);
    return found;
  }

  // ---- the view that all charts share

  function show(start, end) {
    const [low, high] = axis.bounds;
    const length = Math.min(high - low, Math.max(SHORTEST, end - start));
    view.start = Math.min(high - length, Math.max(low, (start + end - length) / 2));
    view.end = view.start + length;
    charts.forEach(chart => chart.later());
  }

  function zoom(factor, at = (view.start + view.end) / 2) {
    show(at - (at - view.start) / factor, at + (view.end - at) / factor);
  }

  function move(by) {
    show(view.start + by, view.end + by);
  }

  function reset() {
    show(...axis.first);
  }

  // ---- words

  function step(length, most) {  // 1, 2 or 5 times a power of ten, of which at most so many are in a length
    const power = 10 ** Math.floor(Math.log10(length / most));
    return [1, 2, 5, 10].map(n => n * power).find(n => length / n <= most);
  }

  function digits(of) {
    return Math.max(0, -Math.floor(Math.log10(of) + 1e-9));
  }

  function duration(ms) {
    return ms < 1000 ? `${ms.toFixed(3)} ms` : `${(ms / 1000).toFixed(3)} s`;
  }

  function cut(context, words, width) {
    if (context.measureText(words).width <= width) return words;
    let kept = words.length;
    while (kept > 1 && context.measureText(`${words.slice(0, kept)}…`).width > width) kept--;
    return `${words.slice(0, kept)}…`;
  }

  function after(sorted, from, to, wanted) {  // the first index of [from, to) whose value is above
    while (from < to) {
      const middle = (from + to) >> 1;
      if (sorted[middle] > wanted) to = middle;
      else from = middle + 1;
    }
    return from;
  }

  // ---- what all charts have

  class Chart {
    constructor(holder, spec) {
      this.spec = spec;
      this.name = spec.name;
      this.hidden = new Set();  // labels of the legend
      this.colours = {};
      this.drawn = 0;
      this.canvas = make('canvas', {tabindex: '0', role: 'img', 'aria-label': this.title()}, this.title());
      this.tip = make('div', {class: 'tip', hidden: ''});
      this.legend = make('div', {class: 'legend'});
      holder.append(this.legend, make('div', {class: 'plot'}, this.canvas, this.tip));
      this.context = this.canvas.getContext('2d');
      this.context.font = FONT;
      this.legendOf().forEach(([label, colour, look]) => this.entry(label, colour, look));
      this.listen();
      new ResizeObserver(() => this.resize()).observe(holder);
      this.resize();
    }

    entry(label, colour, look) {
      const button = make('button', {type: 'button', 'aria-pressed': 'true'},
        make('i', {style: look === 'frame' ? 'border: 2px solid var(--ink)' : look === 'dashed' ? `border-top: 2px dashed ${colour}; height: 0` : `background: ${colour}`}), label);
      button.onclick = () => {
        if (!this.hidden.delete(label)) this.hidden.add(label);
        button.setAttribute('aria-pressed', String(!this.hidden.has(label)));
        this.later();
      };
      this.legend.append(button);
    }

    resize() {
      const width = this.canvas.parentElement.clientWidth;
      const height = this.height();
      if (!width) return;
      const dense = devicePixelRatio || 1;
      this.width = width;
      this.canvas.style.height = `${height}px`;
      this.canvas.width = Math.round(width * dense);
      this.canvas.height = Math.round(height * dense);
      this.dense = dense;
      this.draw();
    }

    later() {
      this.waiting ??= requestAnimationFrame(() => this.draw());
    }

    get left() {
      return Math.min(margin, Math.round(0.3 * this.width));
    }

    get right() {
      return this.width - RIGHT;
    }

    x(ms) {
      return this.left + (ms - view.start) / (view.end - view.start) * (this.right - this.left);
    }

    ms(x) {
      return view.start + (x - this.left) / (this.right - this.left) * (view.end - view.start);
    }

    draw() {
      cancelAnimationFrame(this.waiting);
      this.waiting = undefined;
      const context = this.context, height = this.height();
      const style = getComputedStyle(document.documentElement);
      for (const name of ['ink', 'soft', 'line']) this.colours[name] = style.getPropertyValue(`--${name}`).trim();
      context.setTransform(this.dense, 0, 0, this.dense, 0, 0);
      context.clearRect(0, 0, this.width, height);
      context.font = FONT;
      this.ticks(height);
      context.save();
      context.beginPath();
      context.rect(this.left, 0, this.right - this.left, height - BOTTOM + 1);
      context.clip();
      this.fill();
      context.restore();
      if (this.selecting) {
        const [a, b] = this.selecting.map(ms => this.x(ms));
        context.fillStyle = this.colours.ink;
        context.globalAlpha = 0.12;
        context.fillRect(Math.min(a, b), TOP, Math.abs(b - a), height - BOTTOM - TOP);
        context.globalAlpha = 1;
      }
    }

    ticks(height) {
      const context = this.context, every = step(view.end - view.start, Math.max(2, (this.right - this.left) / 90));
      context.textAlign = 'center';
      context.textBaseline = 'top';
      context.lineWidth = 1;
      for (let n = Math.ceil(view.start / every); n * every <= view.end; n++) {
        const x = Math.round(this.x(n * every)) + 0.5;
        context.strokeStyle = this.colours.line;
        context.beginPath();
        context.moveTo(x, TOP);
        context.lineTo(x, height - BOTTOM);
        context.stroke();
        context.fillStyle = this.colours.soft;
        const words = (n * every + 0).toFixed(digits(every)), half = context.measureText(words).width / 2;
        if (x + half <= this.width) context.fillText(words, x, height - BOTTOM + 4);
      }
      context.textAlign = 'right';
      context.textBaseline = 'bottom';
      context.fillText('milliseconds', this.right, height - 1);
    }

    line(x0, y0, x1, y1, colour, width, dash = []) {
      const context = this.context;
      context.strokeStyle = colour;
      context.lineWidth = width;
      context.setLineDash(dash);
      context.beginPath();
      context.moveTo(x0, y0);
      context.lineTo(x1, y1);
      context.stroke();
      context.setLineDash([]);
    }

    // ---- hands

    listen() {
      const canvas = this.canvas;
      canvas.addEventListener('wheel', event => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        zoom(Math.exp(-event.deltaY / 400), this.ms(event.offsetX));
      }, {passive: false});
      canvas.addEventListener('pointerdown', down => {
        if (down.button) return;
        const selects = down.shiftKey, from = this.ms(down.offsetX);
        let moved = false, before = down.clientX;
        canvas.setPointerCapture(down.pointerId);
        const follow = event => {
          if (!moved && Math.abs(event.clientX - down.clientX) < 4) return;
          moved = true;
          this.tip.hidden = true;
          if (selects) {
            this.selecting = [from, this.ms(event.offsetX)];
            this.later();
            return;
          }
          canvas.classList.add('drag');
          move((before - event.clientX) / (this.right - this.left) * (view.end - view.start));
          before = event.clientX;
        };
        const up = event => {
          canvas.removeEventListener('pointermove', follow);
          canvas.removeEventListener('pointerup', up);
          canvas.removeEventListener('pointercancel', up);
          canvas.classList.remove('drag');
          const between = this.selecting;
          this.selecting = undefined;
          if (between) show(Math.min(...between), Math.max(...between));
          else if (!moved && event.type === 'pointerup') this.click(event.offsetX, event.offsetY);
        };
        canvas.addEventListener('pointermove', follow);
        canvas.addEventListener('pointerup', up);
        canvas.addEventListener('pointercancel', up);
      });
      canvas.addEventListener('pointermove', event => {
        if (!event.buttons) this.hover(event.offsetX, event.offsetY);
      });
      canvas.addEventListener('pointerleave', () => { this.tip.hidden = true; });
      canvas.addEventListener('keydown', event => {
        const length = view.end - view.start;
        const does = {
          ArrowLeft: () => move(-0.1 * length), ArrowRight: () => move(0.1 * length),
          '+': () => zoom(1.3), '=': () => zoom(1.3), '-': () => zoom(1 / 1.3), 0: reset,
        }[event.key];
        if (!does || event.ctrlKey || event.metaKey || event.altKey) return;
        event.preventDefault();
        does();
      });
    }

    tell(x, y, words) {
      this.tip.replaceChildren(...words.map((text, i) => make(i ? 'div' : 'b', {}, text)));
      this.tip.hidden = false;
      const {offsetWidth: width, offsetHeight: height} = this.tip;
      this.tip.style.left = `${Math.max(0, x + 14 + width > this.width ? x - 14 - width : x + 14)}px`;
      this.tip.style.top = `${Math.max(0, y + 14 + height > this.height() ? y - 10 - height : y + 14)}px`;
    }

    hover(x, y) {
      const words = x < this.left || x > this.right ? null : this.at(x, y);
      this.canvas.style.cursor = words && this.clicks ? 'pointer' : '';
      if (words) this.tell(x, y, words);
      else this.tip.hidden = true;
    }

    click() {}
  }

  // ---- what the queues do

  class Timeline extends Chart {
    clicks = true;

    title() {
      const {rows, spans} = this.spec;
      return `Timeline (${this.spec.name}): ${spans.row.length} firings of ${rows.length} queues`;
    }

    height() {
      const last = this.spec.rows.at(-1);
      return TOP + Math.round(PIXELS * (last ? last.top + last.tall : 1)) + BOTTOM;
    }

    legendOf() {
      const {kinds, bubbles, spans, rows} = this.spec;
      this.first = rows.map((_, row) => after(spans.row, 0, spans.row.length, row - 1));
      this.first.push(spans.row.length);
      this.gaps = rows.map((_, row) => after(bubbles.row, 0, bubbles.row.length, row - 1));
      this.gaps.push(bubbles.row.length);
      this.critical = new Set(spans.critical);
      const found = kinds.map(kind => [kind.label, kind.colour]);
      if (bubbles.row.length) found.push(['bubble', bubbles.colour]);
      if (spans.critical.length) found.push(['critical cycle', '', 'frame']);
      return found;
    }

    ticks(height) {
      super.ticks(height);
      const context = this.context;
      context.textAlign = 'right';
      context.textBaseline = 'middle';
      context.fillStyle = this.colours.soft;
      for (const row of this.spec.rows) {
        context.fillText(cut(context, row.label, this.left - 10), this.left - 8, TOP + PIXELS * (row.top + row.tall / 2));
      }
    }

    box(row) {
      const {top, tall} = this.spec.rows[row];
      return [TOP + PIXELS * (top + 0.08 * tall), 0.84 * PIXELS * tall];
    }

    fill() {
      const {rows, kinds, spans, bubbles} = this.spec, context = this.context;
      const away = kinds.map(kind => this.hidden.has(kind.label));
      const framed = this.hidden.has('critical cycle') ? new Set() : this.critical;
      const frames = [];
      this.drawn = 0;
      for (let row = 0; row < rows.length; row++) {
        const [y, tall] = this.box(row);
        if (!this.hidden.has('bubble')) {
          context.fillStyle = bubbles.colour;
          context.globalAlpha = 0.35;
          for (let k = after(bubbles.end, this.gaps[row], this.gaps[row + 1], view.start); k < this.gaps[row + 1] && bubbles.start[k] < view.end; k++) {
            context.fillRect(this.x(bubbles.start[k]), y, this.x(bubbles.end[k]) - this.x(bubbles.start[k]), tall);
          }
          context.globalAlpha = 1;
        }
        let painted = -Infinity;  // up to where this row is: firings within one pixel are drawn once
        for (let k = after(spans.end, this.first[row], this.first[row + 1], view.start); k < this.first[row + 1] && spans.start[k] < view.end; k++) {
          if (away[spans.kind[k]]) continue;
          this.drawn++;
          const kind = kinds[spans.kind[k]], a = this.x(spans.start[k]), b = this.x(spans.end[k]);
          const special = framed.has(k) || spans.actor[k] === chosen;
          if (special) frames.push([k, a, y, b - a, tall]);
          if (b < painted + 0.5 && !special) continue;
          painted = Math.max(a + 0.7, b);
          context.fillStyle = kind.colour;
          context.globalAlpha = chosen === null || spans.actor[k] === chosen ? 1 : 0.75;
          context.fillRect(a, y, painted - a, tall);
          context.globalAlpha = 1;
          if (kind.full && b - a > 3) {
            context.strokeStyle = 'rgb(255 255 255 / 55%)';
            context.lineWidth = 0.8;
            context.strokeRect(a, y, b - a, tall);
          }
          if (!kind.numbered) continue;
          const from = Math.max(a, this.left), to = Math.min(b, this.right), words = String(spans.piece[k]);
          if (to - from > 5 + 7 * words.length) {
            context.fillStyle = kind.ink;
            context.textAlign = 'center';
            context.textBaseline = 'middle';
            context.fillText(words, (from + to) / 2, y + tall / 2 + 0.5);
          }
        }
      }
      for (const [k, a, y, width, tall] of frames) {
        const mine = spans.actor[k] === chosen;
        context.strokeStyle = mine ? kinds[spans.kind[k]].colour : this.colours.ink;
        context.lineWidth = mine ? 3 : 2;
        context.strokeRect(a, y, Math.max(width, 0.7), tall);
        if (mine && framed.has(k)) {
          context.strokeStyle = this.colours.ink;
          context.lineWidth = 1;
          context.strokeRect(a, y, Math.max(width, 0.7), tall);
        }
      }
      const bottom = this.height() - BOTTOM;
      for (const edge of [0, axis.first[0] + axis.first[1]]) {  // the view is as much wider than the iteration on both sides
        this.line(this.x(edge), TOP, this.x(edge), bottom, bubbles.colour, 1.5, [2, 4]);
      }
    }

    firing(x, y) {  // its number, or -1
      const {rows, kinds, spans} = this.spec, ms = this.ms(x);
      const row = rows.findIndex((_, k) => { const [top, tall] = this.box(k); return y >= top && y <= top + tall; });
      if (row < 0) return -1;
      const slack = (view.end - view.start) / (this.right - this.left);  // a pixel, for those that are shorter
      let best = -1, nearest = Infinity;
      for (let k = after(spans.end, this.first[row], this.first[row + 1], ms - slack); k < this.first[row + 1] && spans.start[k] <= ms + slack; k++) {
        if (this.hidden.has(kinds[spans.kind[k]].label)) continue;
        const off = Math.max(spans.start[k] - ms, ms - spans.end[k], 0);
        if (off < nearest) [best, nearest] = [k, off];
      }
      return best;
    }

    at(x, y) {
      const k = this.firing(x, y), {spans, names} = this.spec;
      if (k < 0) return null;
      return [
        `${names[spans.actor[k]]} · micro-batch ${spans.piece[k]} · iteration ${spans.iteration[k]}`,
        `${duration(spans.end[k] - spans.start[k])}, from ${spans.start[k].toFixed(3)} ms`,
      ];
    }

    click(x, y) {
      const k = this.firing(x, y);
      if (k >= 0) actorflow.open(this.spec.spans.actor[k]);
    }

    place(actor) {
      const {spans, rows} = this.spec;
      const k = spans.actor.findIndex((a, i) => a === actor && spans.start[i] >= view.start && spans.end[i] <= view.end);
      if (k < 0) return null;
      const box = this.canvas.getBoundingClientRect(), row = rows[spans.row[k]];
      return [box.left + this.x((spans.start[k] + spans.end[k]) / 2), box.top + TOP + PIXELS * (row.top + row.tall / 2)];
    }
  }

  // ---- what ranks hold

  class Memory extends Chart {
    title() {
      const {lines, most} = this.spec;
      return `Memory (${this.spec.name.replace('-memory', '')}): ${lines.length} different curves, ${this.amount(most)} at most`;
    }

    get unit() {
      return UNITS.find(([, size]) => this.spec.most >= size) ?? UNITS.at(-1);
    }

    amount(bytes) {
      const [word, size] = this.unit;
      return `${(bytes / size).toLocaleString('en', {maximumFractionDigits: 1})} ${word}`;
    }

    height() {
      return TOP + MEMORY + BOTTOM;
    }

    get high() {  // bytes at the top
      return 1.08 * Math.max(this.spec.most, this.spec.limit ?? 0) || 1;
    }

    y(bytes) {
      return TOP + MEMORY * (1 - bytes / this.high);
    }

    legendOf() {
      return this.spec.lines.map(line => [line.label, line.colour, line.dashed ? 'dashed' : '']);
    }

    ticks(height) {
      super.ticks(height);
      const context = this.context, [word, size] = this.unit, every = step(this.high / size, 5);
      context.textAlign = 'right';
      context.textBaseline = 'middle';
      context.fillStyle = this.colours.soft;
      for (let n = 0; n * every <= this.high / size; n++) {
        const y = this.y(n * every * size), words = (n * every).toLocaleString('en', {maximumFractionDigits: digits(every)});
        context.fillText(n ? words : `${words} ${word}`, this.left - 8, y);
        this.line(this.left, Math.round(y) + 0.5, this.right, Math.round(y) + 0.5, this.colours.line, 1);
      }
    }

    fill() {
      const context = this.context;
      this.drawn = 0;
      for (const line of this.spec.lines) {
        if (this.hidden.has(line.label) || !line.at.length) continue;
        this.drawn++;
        const from = Math.max(0, after(line.at, 0, line.at.length, view.start) - 1);
        context.strokeStyle = line.colour;
        context.lineWidth = 1.8;
        context.setLineDash(line.dashed ? [6, 4] : []);
        context.beginPath();
        let y = this.y(line.bytes[from]);
        context.moveTo(this.x(line.at[from]), y);
        let x = this.x(line.at[from]), low = y, high = y;  // what happens within a pixel is one upright line
        for (let k = from + 1; k < line.at.length; k++) {
          const next = this.x(line.at[k]), now = this.y(line.bytes[k]);
          if (next - x >= 1) {
            context.lineTo(x, low);
            context.lineTo(x, high);
            context.lineTo(x, y);
            context.lineTo(next, y);
            [x, low, high] = [next, Math.min(y, now), Math.max(y, now)];
          } else [low, high] = [Math.min(low, now), Math.max(high, now)];
          y = now;
          if (line.at[k] > view.end) break;
        }
        context.lineTo(x, low);
        context.lineTo(x, high);
        context.lineTo(x, y);
        context.stroke();
        context.setLineDash([]);
      }
      const {limit} = this.spec;
      if (limit !== null) this.line(this.left, this.y(limit), this.right, this.y(limit), '#d55e00', 2);
    }

    at(x, y) {
      const ms = this.ms(x);
      let best = null, nearest = 30;
      for (const line of this.spec.lines) {
        const k = after(line.at, 0, line.at.length, ms) - 1;
        if (k < 0 || this.hidden.has(line.label)) continue;
        const off = Math.abs(this.y(line.bytes[k]) - y);
        if (off < nearest) [best, nearest] = [[line.label, `${this.amount(line.bytes[k])} at ${ms.toFixed(3)} ms`], off];
      }
      return best;
    }

    place() {
      return null;
    }
  }

  // ---- the page

  let margin = 60;
  const charts = [];
  const measure = document.createElement('canvas').getContext('2d');
  measure.font = FONT;
  for (const spec of given) {
    for (const row of spec.rows ?? []) margin = Math.max(margin, Math.ceil(measure.measureText(row.label).width) + 14);
  }
  for (const spec of given) {
    const holder = document.querySelector(`[data-chart="${spec.name}"]`);
    if (holder) charts.push(new (spec.kind === 'timeline' ? Timeline : Memory)(holder, spec));
  }
  for (const button of document.querySelectorAll('button[data-time]')) {
    button.onclick = () => (button.dataset.time === 'all' ? reset() : zoom(Number(button.dataset.time)));
  }
  for (const button of document.querySelectorAll('button[data-save]')) {
    button.onclick = () => {
      for (const chart of charts.filter(chart => button.closest('section').contains(chart.canvas))) {
        chart.canvas.toBlob(blob => {
          const link = make('a', {href: URL.createObjectURL(blob), download: `${chart.name}.png`});
          link.click();
          URL.revokeObjectURL(link.href);
        });
      }
    };
  }
  document.addEventListener('themechange', () => charts.forEach(chart => chart.later()));
  document.addEventListener('chosen', event => {
    chosen = event.detail === undefined ? null : Number(event.detail);
    charts.forEach(chart => chart.later());
  });
  addEventListener('beforeprint', () => charts.forEach(chart => chart.resize()));
  addEventListener('afterprint', () => charts.forEach(chart => chart.resize()));

  return {
    // what each chart shows: its name, the milliseconds in view, those that can be, what is hidden, and how many
    // firings or lines are drawn
    list: () => charts.map(chart => ({
      name: chart.name, view: [view.start, view.end], bounds: axis.bounds, hidden: [...chart.hidden], drawn: chart.drawn,
      firings: chart.spec.spans?.row.length ?? 0, colours: chart.colours,
    })),
    show,
    reset,
    // where the middle of an actor's first firing in view is on the screen; null where there is none
    place: (name, actor) => charts.find(chart => chart.name === name)?.place(actor) ?? null,
  };
})();
