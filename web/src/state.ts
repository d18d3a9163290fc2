// What the page shows: all of it is in the address, so that a link shows the same.

export type Quantity = "output" | "output_grad" | "parameter_grad" | "ratio" | "parameter" | "input";
export type Tab = "matrix" | "differences" | "depth" | "source" | "pictures";

export interface State {
  run: string; // its name; "" is the one that was asked for
  rank: number | null; // null is the first
  other: string; // a second run, beside the first, or the first again with another rank
  otherRank: number | null;
  tab: Tab;
  show: Quantity;
  from: number | null; // steps; null is the beginning
  to: number | null; // null is the end, which may still move
  site: string; // key of the selected row: model/site
  toggled: string[]; // keys of rows that are not folded or unfolded as they would be
  find: string;
  fit: boolean; // all rows at once
  theme: "" | "dark" | "light";
}

export const QUANTITIES: { key: Quantity; name: string; short: string; guide?: number }[] = [
  { key: "output", name: "activations", short: "act" },
  { key: "output_grad", name: "gradients", short: "grad", guide: 1e-7 },
  { key: "parameter_grad", name: "weight gradients", short: "w.grad", guide: 1e-7 },
  { key: "ratio", name: "updates", short: "update", guide: 1e-3 },
  { key: "parameter", name: "weights", short: "weight" },
  { key: "input", name: "inputs", short: "input" },
];
const TABS: Tab[] = ["matrix", "differences", "depth", "source", "pictures"];

export const START: State = {
  run: "", rank: null, other: "", otherRank: null, tab: "matrix", show: "output", from: null, to: null,
  site: "", toggled: [], find: "", fit: false, theme: "",
};

/** The state that an address means; what makes no sense is as at the start. */
export function read(hash: string): State {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const one = <T extends string>(name: string, known: readonly T[], otherwise: T): T => {
    const value = given.get(name) as T;
    return known.includes(value) ? value : otherwise;
  };
  const step = (name: string): number | null => {
    const text = given.get(name);
    return text !== null && /^\d{1,15}$/.test(text) ? Number(text) : null;
  };
  const [from, to] = [step("from"), step("to")];
  const upside = from !== null && to !== null && from > to;
  return {
    run: given.get("run") ?? "",
    other: given.get("with") ?? "",
    rank: step("rank"),
    otherRank: step("with_rank"),
    tab: one("tab", TABS, "matrix"),
    show: one("show", QUANTITIES.map((q) => q.key), "output"),
    from: upside ? to : from,
    to: upside ? from : to,
    site: given.get("site") ?? "",
    toggled: given.getAll("fold").filter((key) => key !== ""),
    find: given.get("find") ?? "",
    fit: given.get("fit") === "1",
    theme: one("theme", ["", "dark", "light"], ""),
  };
}

/** The address of a state; what is as at the start is left out. */
export function write(state: State): string {
  const said = new URLSearchParams();
  if (state.run) said.set("run", state.run);
  if (state.other) said.set("with", state.other);
  if (state.rank !== null) said.set("rank", String(state.rank));
  if (state.other && state.otherRank !== null) said.set("with_rank", String(state.otherRank));
  if (state.tab !== START.tab) said.set("tab", state.tab);
  if (state.show !== START.show) said.set("show", state.show);
  if (state.from !== null) said.set("from", String(Math.round(state.from)));
  if (state.to !== null) said.set("to", String(Math.round(state.to)));
  if (state.site) said.set("site", state.site);
  for (const key of state.toggled) said.append("fold", key);
  if (state.find) said.set("find", state.find);
  if (state.fit) said.set("fit", "1");
  if (state.theme) said.set("theme", state.theme);
  return said.toString();
}
