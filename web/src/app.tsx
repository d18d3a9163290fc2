// The page: what it shows is the state in the address, and what it shows that of are answers.

import { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { follow, isFile, loadJson, runs, type Differences as Told, type Finding, type Losses as Table, type Run, type Where, type Window } from "./answers.ts";
import { Bar, Help } from "./bar.tsx";
import type { Scale } from "./colours.ts";
import { useAnswer, useSize, px } from "./data.ts";
import { Depth } from "./depth.tsx";
import { Differences } from "./differences.tsx";
import { Inspector } from "./inspector.tsx";
import { farthest, PER_DECADE, range, sayApart } from "./levels.ts";
import { Losses } from "./losses.tsx";
import { Matrix } from "./matrix.tsx";
import { partings, quantityOf, type Parting } from "./partings.ts";
import { differences, picture, type Apart, type Picture } from "./picture.ts";
import { Pictures } from "./pictures.tsx";
import { Source } from "./source.tsx";
import { QUANTITIES, read, write, type Quantity, type State, type Tab } from "./state.ts";
import { Story } from "./story.tsx";
import { all, badges, build, isOpen, key, owner, pathTo, size, visible, type Node } from "./tree.ts";

const RATIO: Scale = { low: -6 * PER_DECADE, high: 0, map: "around" };
const TABS: [Tab, string][] = [["matrix", "Matrix"], ["differences", "Differences"], ["depth", "Depth"], ["source", "Source"], ["pictures", "Pictures"]];

function useAddress(): [State, (part: Partial<State>, keep?: boolean) => void] {
  const [state, put] = useState(() => read(location.hash));
  useEffect(() => {
    const look = (): void => put(read(location.hash));
    addEventListener("hashchange", look);
    return () => removeEventListener("hashchange", look);
  }, []);
  const change = useCallback((part: Partial<State>, keep = false) => {
    put((before) => {
      const after = { ...before, ...part };
      const hash = `#${write(after)}`;
      if (hash !== location.hash && `#${write(before)}` !== hash) history[keep ? "pushState" : "replaceState"](null, "", hash);
      return after;
    });
  }, []);
  return [state, change];
}

function useTheme(chosen: State["theme"]): void {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const [, again] = useState(0);
  document.documentElement.dataset.theme = chosen || (system.matches ? "dark" : "light");
  useEffect(() => {
    const look = (): void => again((n) => n + 1);
    system.addEventListener("change", look);
    return () => system.removeEventListener("change", look);
  }, []);
}

function useNews(run: string): { revision: number; alive: boolean } {
  const [news, put] = useState({ revision: 0, alive: true });
  useEffect(() => {
    let waiting: ReturnType<typeof setTimeout> | undefined;
    let last = 0;
    const end = follow(run, (alive) => {
      if (!alive) return put((before) => ({ ...before, alive }));
      clearTimeout(waiting);
      const wait = Math.max(0, 700 - (Date.now() - last));
      waiting = setTimeout(() => {
        last = Date.now();
        put((before) => ({ revision: before.revision + 1, alive: true }));
      }, wait);
    });
    return () => {
      clearTimeout(waiting);
      end();
    };
  }, [run]);
  return news;
}

export function App() {
  const [state, change] = useAddress();
  useTheme(state.theme);
  const { revision, alive } = useNews(state.run);
  const where = useMemo<Where>(() => ({ run: state.run, rank: state.rank }), [state.run, state.rank]);
  const asked = useAnswer<Run>(() => loadJson("run", where), [where, revision]);
  const names = useAnswer(() => runs(), [revision === 0]);
  useEffect(() => {
    const second = names.data?.names[1];
    if (isFile && second && !location.hash) change({ other: second }); // a report of two runs compares them
  }, [names.data]);
  if (asked.error)
    return (
      <main class="empty whole"><h1>tenterhook</h1><p class="error">{asked.error}</p>
        <p>The run may be damaged, or moved. <code>tenterhook summary</code> prints what can still be read.</p>
        <p><a href="#" onClick={() => setTimeout(() => location.reload())}>Look again</a></p></main>
    );
  if (!asked.data) return <main class="empty whole" aria-busy="true"><h1>tenterhook</h1><p class="quiet">reading the run …</p></main>;
  return <Page run={asked.data} names={names.data?.names ?? []} {...{ state, change, where, revision, alive }} />;
}

interface PageProps { run: Run; names: string[]; state: State; change: (part: Partial<State>, keep?: boolean) => void; where: Where; revision: number; alive: boolean }

function Page({ run, names, state, change, where, revision, alive }: PageProps) {
  const [help, setHelp] = useState(false);
  const [cursor, setCursor] = useState<number | null>(null);
  const [ref, { width }] = useSize();
  const search = useRef<HTMLInputElement | null>(null);
  const narrow = width > 0 && width < 620;
  const [left, right] = narrow ? [state.tab === "differences" ? 156 : 128, 50] : [Math.min(300, Math.max(190, width * 0.27)), 54];

  const end = run.last + 1;
  const [from, to] = [Math.min(state.from ?? 0, Math.max(0, end - 1)), Math.max(1, state.to === null ? end : Math.min(state.to, end))];
  const view: Window = { from: state.from, to: state.to === null ? null : state.to - 1, columns: Math.min(1600, Math.max(200, Math.round(width))) };
  const asking = [state.show, where, view.from, view.to, Math.ceil(width / 200), revision];
  const ready = width > 0;
  const first = useAnswer<Picture>(ready ? () => picture(run, where, state.show, view) : null, [...asking, run]);
  const loss = useAnswer<Table>(ready ? () => loadJson("steps", where, view) : null, asking);
  const isItself = state.other === run.name && (state.otherRank ?? run.ranks[0]) === run.rank;
  const other = isItself ? "" : state.other;
  const tab = isItself && state.tab === "differences" ? "matrix" : state.tab;
  const beside = useMemo<Where>(() => ({ run: other, rank: state.otherRank }), [other, state.otherRank]);
  const second = useAnswer<{ picture: Picture; table: Table; run: Run } | null>(ready && other ? async () => {
    const run = await loadJson<Run>("run", beside);
    const [one, table] = await Promise.all([picture(run, beside, state.show, view), loadJson<Table>("steps", beside, view)]);
    return { picture: one, table, run };
  } : null, [...asking, beside]);
  const apart = useAnswer<Told>(other && tab === "differences" ? () => loadJson("differences", where, undefined, beside) : null,
    [where, beside, revision, tab === "differences"]);
  const far = useAnswer<Apart>(ready && other && tab === "differences" ? () => differences(run, where, beside, state.show, view) : null,
    [...asking, beside, run, tab === "differences"]);

  const roots = useMemo(() => build(run, state.show), [run, state.show]);
  const large = useMemo(() => size(roots) > 80, [roots]);
  const toggled = useMemo(() => new Set(state.toggled), [state.toggled.join("\n")]);
  const rows = useMemo(() => visible(roots, toggled, state.find), [roots, toggled, state.find]);
  const marks = useMemo(() => badges(roots, run.findings.filter((one) => (one.rank ?? run.rank) === run.rank)), [roots, run]);
  const both = useMemo(() => called(run, other ? (second.data?.run ?? null) : null), [run, second.data, other]);
  const pictures = useMemo(() => {
    const found = first.data ? [{ name: both[0], picture: first.data }] : [];
    return second.data && other ? [...found, { name: both[1], picture: second.data.picture }] : found;
  }, [first.data, second.data, other, both]);
  const tables = useMemo(() => {
    const found = loss.data ? [{ name: both[0], table: loss.data }] : [];
    return second.data && other ? [...found, { name: both[1], table: second.data.table }] : found;
  }, [loss.data, second.data, other, both]);
  const scale = useMemo<Scale>(() => {
    if (state.show === "ratio") return RATIO;
    const known = all(roots).filter((node) => node.times === 1);
    const [low, high] = range(pictures.flatMap((one) => known.map((node) => one.picture.own(node)).filter((levels) => levels !== null)));
    return { low, high, map: "size" };
  }, [pictures, roots, state.show]);
  const factors = useMemo<Scale>(() => {
    const rows = far.data ? all(roots).filter((one) => one.times === 1).map((one) => far.data!.own(one)).filter((row) => row !== null) : [];
    return { low: 0, high: farthest(rows), map: "size", isFactor: true };
  }, [far.data, roots]);
  const node = useMemo(() => find(roots, state.site), [roots, state.site]);

  const select = useCallback((one: Node) => change({ site: one.key }, true), []);
  const toggle = (one: Node): void => change({ toggled: toggled.has(one.key) ? state.toggled.filter((k) => k !== one.key) : [...state.toggled, one.key] });
  const window_ = useCallback((a: number, b: number) => change({ from: a, to: Math.max(b, a + 2) }, true), []);
  const reset = useCallback(() => change({ from: null, to: null }, true), []);
  const go = (finding: Finding): void => {
    const show = shown(finding.what, run) ?? state.show;
    const rank = finding.rank !== undefined && run.ranks.includes(finding.rank) ? finding.rank : run.rank;
    if (rank !== run.rank) change({ rank });
    open(finding.model, finding.site, show, finding.step, tab === "depth" ? "depth" : "matrix");
  };
  const goApart = ({ what, model, site, step }: Parting): void =>
    open(model, site, what === "loss" ? state.show : quantityOf(what), step, "differences");
  const open = (model: string | null, place: string | null, show: Quantity, step: number, tab: Tab): void => {
    const tree = build(run, show);
    const sites = new Set(all(tree).filter((one) => one.model === model).map((one) => one.site));
    const site = place === null || model === null ? "" : key(model, sites.has(place) ? place : owner(place, sites));
    const flipped = new Set(toggled);
    for (const one of pathTo(tree, site, toggled)) flipped.has(one) ? flipped.delete(one) : flipped.add(one);
    const inside = step >= from && step < to;
    change({ site, show, tab, toggled: [...flipped], find: "", ...(inside ? {} : { from: null, to: null }) }, true);
    setCursor(step);
    document.querySelector(".centre")?.scrollIntoView({ block: "nearest" });
  };

  // Before the next key is pressed: an effect would only run after the next frame, and quick keys would see old rows.
  useLayoutEffect(() => {
    const press = (event: KeyboardEvent): void => {
      const target = event.target as HTMLElement;
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "Escape") {
        if (help) return setHelp(false);
        if (target instanceof HTMLInputElement) target.blur();
        return change(state.find ? { find: "" } : { site: "" });
      }
      if (target instanceof HTMLInputElement || target instanceof HTMLSelectElement) return;
      if (help && event.key !== "?") return;
      const at = rows.findIndex((one) => one.key === state.site);
      const now = rows[at];
      const done = act(event.key, {
        "?": () => setHelp(!help),
        "/": () => search.current?.focus(),
        ArrowDown: () => rows[at + 1] && change({ site: rows[at + 1]!.key }),
        ArrowUp: () => rows[at < 0 ? 0 : at - 1] && change({ site: rows[at < 0 ? 0 : at - 1]!.key }),
        Home: () => rows[0] && change({ site: rows[0].key }),
        End: () => rows.length && change({ site: rows[rows.length - 1]!.key }),
        ArrowRight: () => now && (now.children.length && !isOpen(now, toggled, large) ? toggle(now) : now.children.length && change({ site: now.children[0]!.key })),
        ArrowLeft: () => now && (now.children.length && isOpen(now, toggled, large) ? toggle(now) : now.parent && change({ site: now.parent.key })),
        Enter: target instanceof HTMLButtonElement || target instanceof HTMLAnchorElement ? undefined : () => document.querySelector<HTMLElement>(".inspector")?.scrollIntoView({ block: "nearest" }),
        "0": reset, f: () => change({ fit: !state.fit }),
        "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), ",": () => move(-0.25), ".": () => move(0.25),
        n: () => next(1), N: () => next(-1),
        m: () => change({ tab: "matrix" }), d: () => change({ tab: "depth" }), s: () => change({ tab: "source" }), p: () => change({ tab: "pictures" }),
        ...(other ? { c: () => void firstApart() } : {}),
        t: () => change({ theme: document.documentElement.dataset.theme === "dark" ? "light" : "dark" }),
        ...Object.fromEntries(QUANTITIES.map((one, i) => [String(i + 1), () => change({ show: one.key })])),
      });
      if (done) event.preventDefault();
    };
    const firstApart = async (): Promise<void> => {
      change({ tab: "differences" });
      const [parting] = partings(apart.data ?? (await loadJson<Told>("differences", where, undefined, beside)));
      if (parting) goApart(parting);
    };
    const zoom = (times: number): void => {
      const middle = cursor ?? (from + to) / 2;
      const half = Math.max(2, ((to - from) * times) / 2);
      const [a, b] = [Math.max(0, Math.floor(middle - half)), Math.min(end, Math.ceil(middle + half))];
      change(a === 0 && b === end ? { from: null, to: null } : { from: a, to: b });
    };
    const move = (share: number): void => {
      const by = Math.round((to - from) * share);
      const a = Math.max(0, Math.min(end - (to - from), from + by));
      change({ from: a, to: a + (to - from) });
    };
    const next = (by: number): void => {
      const order = [...run.groups].sort((a, b) => run.findings[a[0]!]!.step - run.findings[b[0]!]!.step).flat();
      const now = order.findIndex((i) => key(run.findings[i]!.model ?? "", run.findings[i]!.site ?? "") === state.site);
      const i = order[(now + by + order.length) % order.length] ?? order[0];
      if (i !== undefined) go(run.findings[i]!);
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  });

  const about = QUANTITIES.find((one) => one.key === state.show)!;
  const broken = first.error ?? loss.error ?? second.error ?? apart.error ?? far.error;
  const layers = { rows, large, toggled, from, to, left, right, cursor, badges: marks, selected: state.site, fit: state.fit, onSelect: select, onToggle: toggle, onHover: setCursor, onWindow: window_, onReset: reset };
  const none = first.data && !first.data.matrix.places.length;
  return (
    <>
      <Bar {...{ run, names, state, alive, change }} second={other ? (second.data?.run ?? null) : null} onHelp={() => setHelp(true)} />
      {!alive && !isFile && <p class="banner" role="alert">The server does not answer: what you see is the last that it said. Start <code>tenterhook view</code> again and open the address that it prints.</p>}
      <main>
        <div class="centre" ref={ref}>
          {loss.data && <Losses {...{ tables, from, to, left, right, cursor }} onWindow={window_} onReset={reset} onHover={setCursor} />}
          {(state.from !== null || state.to !== null) && <button type="button" class="plainbutton window" onClick={reset} title="the whole run (0)">steps {from.toLocaleString("en-US")}–{(to - 1).toLocaleString("en-US")} ×</button>}
          <div class="tools">
            <input ref={search} type="search" placeholder="search  /" aria-label="search layers" value={state.find} onInput={(event) => change({ find: event.currentTarget.value })} />
            <div class="choice" role="radiogroup" aria-label="what is shown">
              {QUANTITIES.map((one, i) => (
                <button type="button" role="radio" aria-checked={state.show === one.key} title={`${one.name} (${i + 1})`} onClick={() => change({ show: one.key })}>{narrow ? one.short : one.name}</button>
              ))}
            </div>
            <span class="right">
            <div class="choice tabs" role="tablist">
              {TABS.filter(([one]) => one === tab || (one === "pictures" ? run.pictures?.length : one !== "differences" || other)).map(([one, name]) => (
                <button type="button" role="tab" aria-selected={one === tab} onClick={() => change({ tab: one })}>{name}</button>
              ))}
            </div>
            {(tab === "matrix" || tab === "differences") && <button type="button" class="plainbutton" aria-pressed={state.fit} title="all rows at once (f)" onClick={() => change({ fit: !state.fit })}>fit</button>}
            </span>
          </div>
          {pictures.length > 1 && tab === "matrix" && <p class="two" style={px({ paddingLeft: left, paddingRight: right })}>{pictures.map((one) => <b>{one.name}</b>)}</p>}
          {tab === "differences" && other && apart.data && <Differences told={apart.data} names={both} onGo={goApart} />}
          {tab === "differences" && other && apart.busy && !apart.data && <p class="apart quiet">comparing …</p>}
          <div class="pane">
            {broken && <p class="error">{broken}</p>}
            {tab === "matrix" && (none || !run.sampled ? (
              <div class="empty">
                <p>{run.sampled ? `No ${about.name} were recorded.` : run.ended === null ? "Nothing is sampled so far." : "Nothing was sampled in this run."}</p>
                <p>{run.sampled ? <>Choose another of the six above, or record them: <code>--what output,output_grad,parameter,parameter_grad,update</code>.</> : run.ended === null ? "The page fills by itself as soon as the training has made its first step." : <>No model was called in training, or it ended before its first step. <code>tenterhook summary</code> has the reasons.</>}</p>
              </div>
            ) : rows.length ? (
              <Matrix {...layers} {...{ pictures, scale }} />
            ) : <div class="empty"><p>No layer matches “{state.find}”.</p><p>Part of an address or of a class does: <code>attn</code>, <code>Linear</code>. <kbd>Esc</kbd> clears it.</p></div>)}
            {tab === "differences" && !other && <div class="empty"><p>There is nothing to compare with.</p><p>Choose another run or rank above, or open two: <code>tenterhook view A B</code>.</p></div>}
            {tab === "differences" && other && far.data && (far.data.matrix.places.length && far.data.matrix.steps.length ? (
              <Matrix {...layers} pictures={[{ name: "", picture: far.data }]} scale={factors} say={sayApart} note={(one) => since(far.data!, one)} />
            ) : <div class="empty"><p>No {about.name} were sampled in the same steps of both.</p><p>Choose another of the six above; what differs of the others is said above.</p></div>)}
            {tab === "depth" && <Depth {...{ roots, pictures, from, to }} show={state.show} selected={state.site} onSelect={select} />}
            {tab === "source" && <Source {...{ run, where, roots, node, scale }} picture={first.data} badges={marks} onSelect={select} />}
            {tab === "pictures" && <Pictures {...{ run, where, node, cursor }} onSelect={(site) => change({ site })} />}
          </div>
        </div>
        <aside>
          {node && <Inspector {...{ node, run, where, from, to, revision }} onSource={() => change({ tab: "source" }, true)} onClose={() => change({ site: "" })} />}
          <Story run={run} onGo={go} selected={state.site} />
        </aside>
      </main>
      {help && <Help onClose={() => setHelp(false)} />}
    </>
  );
}

/** The names of one or two runs: with their ranks where these are what tells them apart. */
function called(run: Run, second: Run | null): [string, string] {
  const ranked = (one: Run): string => (one.ranks.length > 1 ? `${one.name} · rank ${one.rank}` : one.name);
  if (second && second.name === run.name) return [`rank ${run.rank}`, `rank ${second.rank}`];
  return second ? [ranked(run), ranked(second)] : [run.name, ""];
}

function since(apart: Apart, node: Node): string {
  const first = apart.first(node);
  return first ? `from ${first[0].toLocaleString("en-US")}` : "";
}

function act(pressed: string, keys: Record<string, (() => unknown) | undefined>): boolean {
  const what = Object.hasOwn(keys, pressed) ? keys[pressed] : undefined;
  what?.();
  return what !== undefined;
}

/** A row by its key; a parameter's module where the rows are modules. */
function find(roots: Node[], wanted: string): Node | null {
  if (!wanted) return null;
  const nodes = new Map(all(roots).map((one) => [one.key, one]));
  const exact = nodes.get(wanted);
  if (exact) return exact;
  const cut = wanted.indexOf("/");
  const model = wanted.slice(0, cut);
  const sites = new Set([...nodes.values()].filter((one) => one.model === model).map((one) => one.site));
  return nodes.get(key(model, owner(wanted.slice(cut + 1), sites))) ?? null;
}

/** Which of the six shows what a finding is about. */
function shown(what: string | null, run: Run): Quantity | null {
  if (what === null) return null;
  const known = run.places.some((place) => place[2] === what);
  if (what === "update") return known ? "ratio" : null;
  return known && QUANTITIES.some((one) => one.key === what) ? (what as Quantity) : null;
}
