// Any rank of a plan that lists one of each class of alike ranks: its class, and with whom it communicates.
(() => {
  const data = JSON.parse(document.getElementById('data').textContent);
  if (!data.ranks) return;
  const {make, present, facts, link} = actorflow;
  const {world, node, classes, partners} = data.ranks;
  const MOST = 12;  // ranks that are named of a group
  const form = document.getElementById('ask');
  const input = document.getElementById('rank');

  const classOf = new Int32Array(world);
  classes.forEach((one, number) => {
    for (const [first, step, count] of one.ranks) {
      for (let k = 0; k < count; k++) classOf[first + k * step] = number;
    }
  });

  const members = (stretches, by) => stretches.flatMap(
    ([first, step, count]) => Array.from({length: count}, (_, k) => by + first + k * step));

  // the groups of one kind of communication that a rank is in, each as the list of its ranks
  function groupsOf(rank, {groups}) {
    const found = [];
    for (const [stretches, apart, times] of groups) {
      for (let k = 0; k < times; k++) {
        const by = k * apart;
        const inside = stretches.some(([first, step, count]) => {
          const at = rank - by - first;
          return step ? at % step === 0 && at / step >= 0 && at / step < count : at === 0;
        });
        if (inside) found.push(members(stretches, by));
      }
    }
    return found;
  }

  // [what it does, the other ranks, bytes] for each way in which a rank communicates
  function peers(rank) {
    const moves = classes[classOf[rank]].moves;
    const found = new Map();
    partners.forEach((kind, index) => {
      for (const group of groupsOf(rank, kind)) {
        const way = kind.label !== 'send' ? '' : group[0] === rank ? 'to' : 'from';
        const what = {'': kind.label, to: 'sends to', from: 'receives from'}[way];
        const others = group.filter(other => other !== rank);
        const key = `${what} ${others}`;
        if (!found.has(key)) found.set(key, {what, others, bytes: moves[index + way]});
      }
    });
    return [...found.values()];
  }

  function named(ranks) {
    const shown = ranks.slice(0, MOST).flatMap((rank, i) => [i ? ', ' : '', make('a', {href: '#', 'data-rank': rank}, String(rank))]);
    return ranks.length > MOST ? [...shown, ` … (${ranks.length.toLocaleString('en')})`] : shown;
  }

  function open(rank) {
    if (!Number.isInteger(rank) || rank < 0 || rank >= world) return;
    const number = classOf[rank];
    const one = classes[number];
    const content = [make('h2', {}, `rank ${rank}`), facts([
      ['class', `${number}: ranks ${one.text}`], ['node', node ? String(Math.floor(rank / node)) : undefined], ...one.facts,
    ]), make('h3', {}, 'Communicates with')];
    for (const {what, others, bytes} of peers(rank)) {
      const amount = bytes ? make('small', {}, ` ${bytes} in an iteration`) : '';
      content.push(make('div', {class: 'reg peers'}, make('b', {}, what), ' ', ...named(others), amount));
    }
    content.push(make('h3', {}, 'Actors of its class'), ...one.actors.flatMap((id, i) => (i ? [', ', link(id)] : [link(id)])));
    present(...content);
  }

  form.addEventListener('submit', event => {
    event.preventDefault();
    open(Number(input.value));
  });
  document.addEventListener('click', event => {
    const at = event.target.closest('[data-rank]');
    if (!at) return;
    event.preventDefault();
    input.value = at.dataset.rank;
    open(Number(at.dataset.rank));
  });
  Object.assign(actorflow, {rank: open, peers});
})();
