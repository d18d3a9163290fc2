// Findings of several ranks.

import type { Run } from "./answers.ts";

/** The findings of a group, those that several ranks have made alike as one: that of the shown rank, if it has it. */
export function together(group: number[], run: Run): { i: number; ranks: number[] }[] {
  const found = new Map<string, { i: number; ranks: number[] }>();
  for (const i of group) {
    const { rule, model, site, what, severity, rank } = run.findings[i]!;
    const alike = JSON.stringify([rule, model, site, what, severity]);
    const known = found.get(alike);
    const isNew = rank === undefined || !known?.ranks.includes(rank);
    if (!known || !isNew) found.set(known ? `${alike}${i}` : alike, { i, ranks: rank === undefined ? [] : [rank] });
    else {
      known.ranks.push(rank!);
      if (rank === run.rank) known.i = i;
    }
  }
  return [...found.values()];
}

/** rank 2; ranks 0, 3; all ranks */
export function said(ranks: number[], run: Run): string {
  if (run.ranks.length < 2 || !ranks.length) return "";
  if (run.ranks.every((rank) => ranks.includes(rank))) return "all ranks";
  const sorted = [...ranks].sort((a, b) => a - b);
  return `${ranks.length > 1 ? "ranks" : "rank"} ${sorted.length > 4 ? `${sorted.slice(0, 4).join(", ")} and ${sorted.length - 4} more` : sorted.join(", ")}`;
}
