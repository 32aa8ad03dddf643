// What the page does: search, details of what is clicked, zoom, light and dark.  No library, no network.
const actorflow = (() => {
  const data = JSON.parse(document.getElementById('data').textContent);
  const details = document.getElementById('details');
  const input = document.getElementById('search');
  const results = document.getElementById('results');
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];

  function make(tag, attributes = {}, ...children) {
    const found = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
    found.append(...children);
    return found;
  }

  // ---- details

  function link(id) {
    const actor = data.actors[id];
    if (!actor) return make('code', {}, data.others[id] ?? `#${id}`);
    return make('a', {href: '#', 'data-actor': id}, make('code', {}, actor.name));
  }

  function links(ids) {
    return ids.flatMap((id, i) => (i ? [', ', link(id)] : [link(id)]));
  }

  function facts(pairs) {
    const list = make('dl');
    for (const [word, value] of pairs) {
      if (value !== undefined && value !== '') list.append(make('dt', {}, word), make('dd', {}, value));
    }
    return list;
  }

  function register(id, own) {
    const r = data.registers[id];
    const ends = String(r.from) === own ? ['to ', ...links(r.to)] : ['from ', link(r.from)];
    const slots = r.tensors.length
      ? `${r.slots} slot${r.slots > 1 ? 's' : ''} of ${r.bytes}` : `${r.slots} slot${r.slots > 1 ? 's' : ''}, order only`;
    const full = r.initial ? `, ${r.initial} initial token${r.initial > 1 ? 's' : ''}` : '';
    const box = make('div', {class: 'reg'},
      make('div', {}, make('b', {}, `r${id} `),
        make('span', {class: 'slots'}, '■'.repeat(Math.min(r.initial, 12)) + '□'.repeat(Math.max(0, Math.min(r.slots, 12) - r.initial))),
        ` ${slots}${full}, `, ...ends));
    if (r.tensors.length) {
      const table = make('table');
      for (const row of r.tensors) table.append(make('tr', {}, ...row.map(cell => make('td', {}, cell))));
      box.append(table);
    }
    return box;
  }

  function source(line) {
    const code = data.code?.[line];
    const [file, number] = [line.slice(0, line.lastIndexOf(':')), Number(line.slice(line.lastIndexOf(':') + 1))];
    const box = make('div', {}, make('code', {}, line));
    if (code) {
      const pre = make('pre');
      code.lines.forEach((text, i) => {
        const at = code.first + i;
        const words = `${String(at).padStart(4)}  ${text}\n`;
        pre.append(at === number ? make('b', {}, words) : words);
      });
      box.append(pre);
    }
    return box;
  }

  function ops(actor) {
    const names = data.bodies[actor.body] ?? [];
    const list = make('ol');
    const origins = actor.origins ?? [];
    let before = -1;
    let at = 0;
    while (at < names.length) {
      const origin = origins[at] ?? -1;
      if (origin !== before && origin >= 0) {
        const [module, line] = data.origins[origin];
        const head = make('li', {class: 'from'}, make('b', {}, module || 'the step'));
        if (line) head.append(' ', make('a', {href: '#', 'data-line': line}, line.split('/').pop()));
        list.append(head);
      }
      before = origin;
      let end = at + 1;
      while (end < names.length && names[end] === names[at] && (origins[end] ?? -1) === origin) end++;
      list.append(make('li', {}, names[at] + (end - at > 1 ? ` ×${end - at}` : '')));
      at = end;
    }
    return list;
  }

  function present(...content) {
    const close = make('button', {class: 'close', 'aria-label': 'Close'}, '×');
    close.onclick = shut;
    details.replaceChildren(close, ...content);
    details.hidden = false;
    details.scrollTop = 0;
  }

  function shut() {
    details.hidden = true;
    mark();
  }

  function open(id) {
    id = String(id);
    const actor = data.actors[id];
    if (!actor) return;
    const tag = make('span', {class: `tag k-${actor.kind}`}, actor.kind);
    const content = [make('h2', {}, actor.name), tag, facts([
      ['rank', String(actor.rank)], ['queue', actor.queue], ['stage', String(actor.stage)],
      ['fires', `${actor.rate}× in an iteration`], ['takes', actor.duration], ['work', actor.work],
      ['needs', actor.workspace], ['communication', actor.comm],
    ])];
    for (const [word, ids] of [['Reads', actor.reads], ['Writes', actor.writes]]) {
      if (ids.length) content.push(make('h3', {}, `${word} ${ids.length} register${ids.length > 1 ? 's' : ''}`), ...ids.map(r => register(r, id)));
    }
    for (const [word, names] of [['Variables and inputs', actor.takes], ['Updates', actor.gives]]) {
      if (names.length) content.push(make('h3', {}, word), make('code', {}, names.join(', ')));
    }
    if (actor.body !== undefined) content.push(make('h3', {}, `${data.bodies[actor.body].length} ops`), ops(actor));
    present(...content);
    mark(id);
  }

  function openPart(id) {
    const part = data.parts[id];
    if (!part) return;
    const content = [make('h2', {}, part.module), facts([
      ['phase', part.phase], ['placement', part.placement],
      [part.phase === 'variable' ? 'variables' : part.phase === 'input' ? 'arguments' : 'ops', String(part.count)],
    ])];
    for (const [word, edges] of [['Reads', part.reads], ['Gives', part.gives]]) {
      if (!edges.length) continue;
      content.push(make('h3', {}, word));
      for (const [name, other, values] of edges) {
        content.push(make('div', {class: 'reg'}, make('a', {href: '#', 'data-part': other}, name),
          ...values.map(v => make('div', {class: 'mono'}, v))));
      }
    }
    const actors = part.actors.filter(a => data.actors[a]);
    if (actors.length) content.push(make('h3', {}, 'Actors'), ...links(actors));
    if (part.lines.length) content.push(make('h3', {}, 'Lines'), ...part.lines.map(source));
    if (part.names.length) content.push(make('h3', {}, 'Names'), make('code', {}, part.names.join(', ')));
    present(...content);
    mark(undefined, id);
  }

  function mark(actor, part) {
    document.dispatchEvent(new CustomEvent('chosen', {detail: actor}));
    all('.chosen').forEach(e => e.classList.remove('chosen'));
    for (const [name, id] of [['actor', actor], ['part', part]]) {
      if (id === undefined) continue;
      for (const e of all(`g[data-${name}="${id}"]`)) {
        e.classList.add('chosen');
      }
    }
  }

  function bring(selector) {
    const e = document.querySelector(selector);
    const canvas = e?.closest('.canvas');
    if (!canvas) return;
    canvas.closest('section').scrollIntoView({block: 'start'});
    const [a, b] = [e.getBoundingClientRect(), canvas.getBoundingClientRect()];
    canvas.scrollBy(a.left - b.left - b.width / 3, a.top - b.top - b.height / 3);
  }

  document.addEventListener('click', event => {
    const at = event.target.closest('[data-actor], [data-part], [data-line], [data-register]');
    if (!at) return;
    event.preventDefault();
    if (at.dataset.actor !== undefined) {
      open(at.dataset.actor);
      if (at.closest('aside')) bring(`g[data-actor="${at.dataset.actor}"]`);
    } else if (at.dataset.part !== undefined) {
      openPart(at.dataset.part);
      if (at.closest('aside')) bring(`g[data-part="${at.dataset.part}"]`);
    }
    else if (at.dataset.register !== undefined) open(at.dataset.from);
    else at.replaceWith(source(at.dataset.line));
  });

  // ---- what is joined to what the mouse is on

  function follow(graph) {
    let shown = null;
    graph.addEventListener('mouseover', event => {
      const at = event.target.closest('g[data-actor], g[data-part]');
      const id = at?.dataset.actor ?? at?.dataset.part;
      if (id === shown) return;
      shown = id ?? null;
      all('.hot, .dim', graph).forEach(e => e.classList.remove('hot', 'dim'));
      if (!at) return;
      for (const e of all('[data-from]', graph)) {
        e.classList.add(e.dataset.from === id || e.dataset.to.split(' ').includes(id) ? 'hot' : 'dim');
      }
    });
    graph.addEventListener('mouseleave', () => {
      shown = null;
      all('.hot, .dim', graph).forEach(e => e.classList.remove('hot', 'dim'));
    });
    graph.addEventListener('keydown', event => {
      if (event.key === 'Enter') event.target.closest('[data-actor], [data-part]')?.dispatchEvent(new MouseEvent('click', {bubbles: true}));
    });
  }
  all('svg.graph').forEach(follow);

  // ---- zoom and pan of drawings

  for (const canvas of all('.canvas')) {
    const scale = (factor, x = canvas.clientWidth / 2, y = canvas.clientHeight / 2) => {
      for (const svg of all('svg', canvas)) {
        const {width, height} = svg.viewBox.baseVal;
        const now = svg.dataset.scale ? Number(svg.dataset.scale) : 1;
        const next = factor === 'fit' ? Math.min(1.25, canvas.clientWidth / width) : Math.min(4, Math.max(0.05, now * factor));
        svg.dataset.scale = next;
        svg.setAttribute('width', width * next);
        svg.setAttribute('height', height * next);
        if (svg.clientWidth) {
          const by = next / now;
          canvas.scrollLeft = (canvas.scrollLeft + x) * by - x;
          canvas.scrollTop = (canvas.scrollTop + y) * by - y;
        }
      }
    };
    canvas.addEventListener('wheel', event => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const box = canvas.getBoundingClientRect();
      scale(Math.exp(-event.deltaY / 400), event.clientX - box.left, event.clientY - box.top);
    }, {passive: false});
    canvas.addEventListener('pointerdown', down => {
      if (down.button || down.target.closest('[data-actor], [data-part]')) return;
      const [left, top] = [canvas.scrollLeft, canvas.scrollTop];
      const move = e => {
        canvas.classList.add('drag');
        canvas.scrollTo(left + down.clientX - e.clientX, top + down.clientY - e.clientY);
      };
      const up = () => {
        canvas.classList.remove('drag');
        removeEventListener('pointermove', move);
        removeEventListener('pointerup', up);
      };
      addEventListener('pointermove', move);
      addEventListener('pointerup', up);
    });
    const tools = canvas.previousElementSibling;
    if (tools?.classList.contains('tools')) {
      for (const button of all('button[data-zoom]', tools)) {
        button.onclick = () => scale(button.dataset.zoom === 'fit' ? 'fit' : Number(button.dataset.zoom));
      }
      for (const button of all('button[data-level]', tools)) {
        button.onclick = () => {
          all('button[data-level]', tools).forEach(b => b.classList.toggle('on', b === button));
          const kept = canvas.querySelector(`script[data-level="${button.dataset.level}"]`);
          if (kept) {
            kept.insertAdjacentHTML('afterend', kept.textContent);
            follow(kept.nextElementSibling);
            kept.remove();
          }
          all('svg', canvas).forEach(svg => { svg.style.display = svg.dataset.level === button.dataset.level ? '' : 'none'; });
        };
      }
    }
  }

  // ---- search

  const entries = [];
  for (const [id, a] of Object.entries(data.actors)) {
    const names = [...new Set((data.bodies[a.body] ?? []))];
    const tensors = [...a.reads, ...a.writes].flatMap(r => data.registers[r].tensors.map(t => t[3]));
    const modules = (a.origins ?? []).map(o => data.origins[o]?.[0] ?? '');
    entries.push({id, label: a.name, kind: a.kind, what: 'actor', pick: () => { open(id); bring(`g[data-actor="${id}"]`); },
      words: [...new Set([...names, ...tensors, ...modules, ...a.takes, ...a.gives])]});
  }
  for (const [id, p] of Object.entries(data.parts ?? {})) {
    entries.push({id, label: p.module, kind: '', what: p.phase, pick: () => { show(p.level); openPart(id); bring(`g[data-part="${id}"]`); }, words: p.names});
  }

  function show(level) {
    document.querySelector(`button[data-level="${level}"]`)?.click();
  }

  function find(text) {
    const wanted = text.toLowerCase();
    const found = [];
    for (const e of entries) {
      if (e.label.toLowerCase().includes(wanted)) found.push([e.label.toLowerCase() === wanted ? 0 : 1, e, e.what]);
      else {
        const word = e.words.find(w => w.toLowerCase().includes(wanted));
        if (word !== undefined) found.push([2, e, `${e.what} with ${word}`]);
      }
    }
    return found.sort((a, b) => a[0] - b[0]).slice(0, 40);
  }

  function list() {
    const text = input.value.trim();
    results.replaceChildren();
    results.hidden = !text;
    if (!text) return;
    const found = find(text);
    for (const [i, [, entry, why]] of found.entries()) {
      const row = make('li', {role: 'option', 'aria-selected': String(i === 0)}, make('code', {}, entry.label), make('small', {}, why));
      row.onmousedown = event => { event.preventDefault(); pick(entry); };
      results.append(row);
    }
    if (!found.length) results.append(make('li', {}, 'Nothing has this name.'));
  }

  function pick(entry) {
    results.hidden = true;
    entry.pick();
  }

  input.addEventListener('input', list);
  input.addEventListener('focus', list);
  input.addEventListener('blur', () => { results.hidden = true; });
  input.addEventListener('keydown', event => {
    const rows = all('li[aria-selected]', results);
    const at = rows.findIndex(r => r.getAttribute('aria-selected') === 'true');
    if (event.key === 'Enter' && rows[at]) rows[at].onmousedown(event);
    if (event.key === 'ArrowDown' || event.key === 'ArrowUp') {
      event.preventDefault();
      const next = rows[(at + (event.key === 'ArrowDown' ? 1 : rows.length - 1)) % rows.length];
      rows.forEach(r => r.setAttribute('aria-selected', String(r === next)));
      next?.scrollIntoView({block: 'nearest'});
    }
  });
  document.addEventListener('keydown', event => {
    if (event.key === '/' && document.activeElement !== input) { event.preventDefault(); input.focus(); }
    if (event.key === 'Escape') { input.blur(); shut(); }
  });

  // ---- light and dark

  document.getElementById('theme').onclick = () => {
    const root = document.documentElement;
    root.dataset.theme = root.dataset.theme === 'dark' ? 'light' : 'dark';
    document.dispatchEvent(new Event('themechange'));
  };

  return {open, openPart, find, make, present, facts, link};
})();
globalThis.actorflow = actorflow;
