// Where the page's data comes from: the server, or the file itself. Both give the same bytes.

export interface Finding {
  step: number;
  rule: string;
  severity: "note" | "warn" | "error";
  model: string | null;
  site: string | null;
  what: string | null;
  text: string;
  why: string;
  then: string;
  until: number | null;
  rank?: number;
}
export interface Module { site: string; class: string; shapes: Record<string, number[]> | null }
export interface Model { name: string; class: string; parameters: number | null; compiled: boolean; modules: Module[] }
export interface Run {
  name: string;
  info: { command: string[] | null; started: number | null; versions: Record<string, string> | null; host: string | null };
  schedule: { every?: number; dense?: number; budget?: number | null };
  rank: number;
  ranks: number[];
  models: Model[];
  ended: string | null;
  overhead: number | null;
  steps: number;
  last: number;
  sampled: number;
  places: [model: string, site: string, what: string, dtype: string][];
  findings: Finding[];
  groups: number[][];
  worst: "note" | "warn" | "error" | null;
  clean: string[];
  unchecked: [rule: string, why: string][];
  remarks: string[];
  sources: [model: string, cls: string][];
  pictures?: Picture[];
}
export interface Picture { step: number; model: string; site: string; what: string; shape: number[]; file: string }
export interface Losses {
  step: number[];
  loss: (number | null)[];
  low: (number | null)[];
  high: (number | null)[];
  rate: (number | null)[];
  bad: boolean[];
}
type Row = (number | null)[];
export interface Values {
  step: number[]; end: number; count: number; calls: number; zeros: number[];
  nan: number[]; pos_inf: number[]; neg_inf: number[];
  mean: Row; std: Row; rms: Row; min: Row; max: Row; absmax: Row; dead?: Row; saturated?: Row;
  low: number; high: number; shares: number[][];
}
export interface Details { model: string; site: string; share: number; kinds: Record<string, Values> }
/** The first step in which a site differs between two runs, by which statistic, and what that is in each. */
export type First = [step: number, statistic: string, a: number | string, b: number | string];
export interface Apart { compared: number; differ: number; steps: number; first?: { model: string; site: string; at: First } }
export interface Differences {
  kinds: Record<string, Apart>;
  share: number; // of the samples whose statistics were read
  loss: { steps: number; first?: { step: number; a: number | string; b: number | string } } | null;
}
export interface Names { first: string; names: string[]; ranks?: Record<string, number[]> }
export interface Source { class: string; file: string; line: number; sites: string[]; lines: [text: string, calls: string[]][] }

/** A run by its name, "" for the first, and a rank of it, null for its first. */
export interface Where { run: string; rank: number | null }
export interface Window { from: number | null; to: number | null; columns?: number }

export class NoAnswer extends Error {}
export class NoServer extends NoAnswer {}

const token = new URLSearchParams(location.search).get("token") ?? "";
const packed = document.getElementById("answers")?.textContent;
export const isFile = packed !== undefined && packed !== null;

let inside: Promise<Map<string, ArrayBuffer>> | undefined;

async function unpack(text: string): Promise<Map<string, ArrayBuffer>> {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const data = await new Response(stream).arrayBuffer();
  const line = new Uint8Array(data).indexOf(10);
  const sizes = JSON.parse(new TextDecoder().decode(data.slice(0, line))) as Record<string, number>;
  const found = new Map<string, ArrayBuffer>();
  let at = line + 1;
  for (const [name, size] of Object.entries(sizes)) {
    found.set(name, data.slice(at, at + size));
    at += size;
  }
  return found;
}

function query(values: Record<string, string | number | null | undefined>): string {
  const said = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) if (value !== null && value !== undefined && value !== "") said.set(name, String(value));
  said.set("token", token);
  return said.toString();
}

async function ask(path: string): Promise<ArrayBuffer> {
  let reply: Response;
  try {
    reply = await fetch(path);
  } catch {
    throw new NoServer("The server does not answer. Start it again with `tenterhook view`, and open the address that it prints.");
  }
  if (reply.ok) return reply.arrayBuffer();
  const text = await reply.text();
  try {
    throw new NoAnswer((JSON.parse(text) as { error: string }).error);
  } catch (error) {
    throw error instanceof NoAnswer ? error : new NoAnswer(text);
  }
}

/** An answer about a run; of differences, those from it to `other`. */
export async function load(name: string, where: Where, window: Window = { from: null, to: null }, other?: Where): Promise<ArrayBuffer> {
  if (packed !== undefined && packed !== null) {
    const answers = await (inside ??= unpack(packed));
    const { first, ranks } = json<Names>(answers.get("runs")!);
    const said = ({ run, rank }: Where): string => `${run || first}/${rank ?? ranks?.[run || first]?.[0] ?? 0}`;
    const found = answers.get([said(where), ...(other ? [said(other)] : []), name].join("/"));
    if (!found)
      throw new NoAnswer(other ? `This file compares ${first} with what else is in it, and not these two. \`tenterhook view\` does.`
        : `This file has nothing about ${name}. Write it again with \`tenterhook report\`.`);
    return found;
  }
  const path = name.split("/").map(encodeURIComponent).join("/");
  return ask(`api/answer/${path}?${query({ run: where.run, rank: where.rank, ...window, with: other?.run || null, with_rank: other?.rank })}`);
}

const json = <T>(data: ArrayBuffer): T => JSON.parse(new TextDecoder().decode(data)) as T;

export async function loadJson<T>(name: string, where: Where, window?: Window, other?: Where): Promise<T> {
  return json(await load(name, where, window, other));
}

export async function runs(): Promise<Names> {
  if (packed !== undefined && packed !== null) return json((await (inside ??= unpack(packed))).get("runs")!);
  return json(await ask(`api/runs?${query({})}`));
}

/** Calls back whenever the run on disk has changed; gives a function that ends it. */
export function follow(run: string, changed: (alive: boolean) => void): () => void {
  if (isFile) return () => {};
  const events = new EventSource(`api/events?${query({ run })}`);
  events.onmessage = () => changed(true);
  events.onerror = () => changed(false);
  return () => events.close();
}
