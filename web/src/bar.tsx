// The top bar: which run, how it goes, what was found, and how it is shown.

import { isFile, type Run } from "./answers.ts";
import { MARKS } from "./matrix.tsx";
import type { State } from "./state.ts";
import { counted, percent } from "./text.ts";

interface Props { run: Run; second: Run | null; names: string[]; state: State; alive: boolean; change: (part: Partial<State>) => void; onHelp: () => void }

export function Bar({ run, second, names, state, alive, change, onHelp }: Props) {
  const others: [string, number | null, string][] = [
    ...run.ranks.filter((rank) => rank !== run.rank).map((rank): [string, number, string] => [run.name, rank, `rank ${rank}`]),
    ...names.filter((name) => name !== run.name).map((name): [string, null, string] => [name, null, name]),
  ];
  const chosen = others.findIndex(([name, rank]) => name === state.other && (name !== run.name || rank === state.otherRank));
  const live = !isFile && alive && run.ended === null;
  const many = (severity: string): number => run.findings.filter((one) => one.severity === severity && one.until === null).length;
  const dark = document.documentElement.dataset.theme === "dark";
  return (
    <header class="bar">
      <h1>tenterhook</h1>
      {names.length > 1 ? (
        <select aria-label="run" title={run.name} value={run.name} onChange={(event) => change({ run: event.currentTarget.value, site: "", from: null, to: null, rank: null })}>
          {names.map((name) => <option value={name}>{name}</option>)}
        </select>
      ) : <b class="runname" title={run.name}>{run.name}</b>}
      {run.ranks.length > 1 && (
        <select aria-label="rank" value={String(run.rank)} onChange={(event) => change({ rank: Number(event.currentTarget.value) })}>
          {run.ranks.map((rank) => <option value={String(rank)}>rank {rank}</option>)}
        </select>
      )}
      {others.length > 0 && (
        <select aria-label="compare with" title={others[chosen]?.[2] ?? "another run or rank, beside this one"} value={String(chosen)} onChange={(event) => {
          const [other, otherRank] = others[Number(event.currentTarget.value)] ?? ["", null];
          change({ other, otherRank, ...(!other && state.tab === "differences" ? { tab: "matrix" } : {}) });
        }}>
          <option value="-1">compare with …</option>
          {others.map(([, , name], i) => <option value={String(i)}>{name}</option>)}
        </select>
      )}
      {second && second.name !== run.name && second.ranks.length > 1 && (
        <select aria-label="its rank" value={String(second.rank)} onChange={(event) => change({ otherRank: Number(event.currentTarget.value) })}>
          {second.ranks.map((rank) => <option value={String(rank)}>rank {rank}</option>)}
        </select>
      )}
      <span class={`live ${live ? "on" : alive || isFile ? "" : "lost"}`} role="status">
        <i />{isFile ? "report" : !alive ? "no server" : live ? "live" : run.ended === "exit 0" || run.ended === "finished" ? "ended" : `ended: ${run.ended}`}
      </span>
      <span class="chip" title="steps so far, and how many of them were sampled">{counted(run.steps, "step")} · {run.sampled.toLocaleString("en-US")} sampled</span>
      {run.overhead !== null && run.overhead !== undefined && <span class="chip" title="what watching took of the training's time">overhead {percent(run.overhead)}</span>}
      <span class={`chip verdict ${run.worst ?? (run.clean.length ? "clean" : "")}`}>
        {run.worst === null ? (run.clean.length ? "✔ clean" : "nothing checked yet")
          : (["error", "warn", "note"] as const).filter(many).map((severity) => <span class={severity}>{MARKS[severity]} {many(severity)}</span>)}
      </span>
      <span class="space" />
      <button type="button" aria-label={dark ? "light colours" : "dark colours"} title="colours" onClick={() => change({ theme: dark ? "light" : "dark" })}>{dark ? "☀" : "☾"}</button>
      <button type="button" aria-label="keys and help" onClick={onHelp}>?</button>
    </header>
  );
}

const KEYS = [
  ["↑ ↓", "the row above, below"], ["→ ←", "open, fold; or to the row above"], ["Enter", "look at it closely"],
  ["1 … 6", "activations, gradients, weight gradients, updates ÷ weights, weights, inputs"],
  ["m d s p", "matrix, depth, source, pictures"], ["c", "of two runs: what differs, and the first difference"], ["+ −", "zoom in and out in time"], [", .", "move in time"], ["0", "the whole run"],
  ["n N", "the next, the last finding"], ["f", "all rows at once"], ["/", "search"], ["t", "dark or light"], ["Esc", "close"],
];

export function Help({ onClose }: { onClose: () => void }) {
  return (
    <div class="help" role="dialog" aria-label="keys and help" onClick={onClose}>
      <div onClick={(event) => event.stopPropagation()}>
        <h2>Keys</h2>
        <dl>{KEYS.map(([keys, what]) => <><dt><kbd>{keys}</kbd></dt><dd>{what}</dd></>)}</dl>
        <h2>What is drawn</h2>
        <p>Each row is a layer, each column a stretch of steps: the largest RMS that was sampled in it. Magenta is NaN or infinite, black is all zero,
          hatched was not sampled. Drag over the loss or the matrix for a window of steps, double-click for the whole run. A folded row shows the largest of what is in it.
          The address of the page has all that you see in it: send it, or keep it.</p>
        <details><summary>Licences of what is in this page</summary><pre>{LICENCES}</pre></details>
        <button type="button" onClick={onClose} autofocus>Close</button>
      </div>
    </div>
  );
}
