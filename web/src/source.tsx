// The forward() that calls the selected site, with a badge on every line that calls a module.

import { loadJson, type Run, type Source as Answer, type Where } from "./answers.ts";
import { css, painter, type Scale } from "./colours.ts";
import { useAnswer, px } from "./data.ts";
import { isNumber, say } from "./levels.ts";
import { MARKS } from "./matrix.tsx";
import type { Picture } from "./picture.ts";
import { all, key, type Node, type Severity } from "./tree.ts";
import { number } from "./text.ts";

interface Props { run: Run; where: Where; roots: Node[]; node: Node | null; picture: Picture | null; scale: Scale; badges: Map<string, Severity>; onSelect: (node: Node) => void }

/** The nearest module at or above the selected one whose source the run has; below the selected one, if that is a leaf. */
function home(run: Run, roots: Node[], node: Node | null): Node | null {
  const known = new Set(run.sources.map(([model, name]) => `${model}/${name}`));
  const has = (one: Node): boolean => known.has(`${one.model}/${one.kind}`);
  for (let above = node; above; above = above.parent) if (above.times === 1 && has(above)) return above;
  return roots.find(has) ?? all(roots).find(has) ?? null;
}

export function Source({ run, where, roots, node, picture, scale, badges, onSelect }: Props) {
  const at = home(run, roots, node);
  const asked = useAnswer<Answer>(at ? () => loadJson(`source/${at.model}/${at.kind}`, where) : null, [at?.model, at?.kind, where.run, where.rank]);
  if (!at)
    return <div class="empty"><p>The run has no source of these models.</p><p>It is recorded from classes that are written in a file. Record the run again with this version, and from a script rather than from a prompt.</p></div>;
  if (asked.error) return <p class="error">{asked.error}</p>;
  if (!asked.data) return <p class="quiet">reading …</p>;
  const { file, line, lines, sites } = asked.data;
  const prefix = at.site === "." ? "" : `${at.site}.`;
  const nodes = all(roots).filter((one) => one.model === at.model && one.times === 1);
  const paint = painter(scale);
  const last = (picture?.matrix.end ?? 1) - 1;
  return (
    <div class="source">
      <p class="facts"><b>{asked.data.class}.forward</b> · {file}:{line} · {sites.length > 1 ? `${at.site}, one of ${sites.length}` : at.site}</p>
      <table><tbody>
        {trimmed(lines).map(([text, calls], i) => {
          const named = calls.flatMap((call) => {
            const pattern = new RegExp(`^${(prefix + call).split("*").map((part) => part.replace(/[.+?^${}()|[\]\\]/g, "\\$&")).join("\\d+")}$`);
            return nodes.filter((one) => pattern.test(one.site));
          });
          const mine = node !== null && named.some((one) => one.key === node.key || node.site.startsWith(`${one.site}.`) || owned(node, one));
          return (
            <tr class={mine ? "mine" : ""}>
              <td class="number">{line + i}</td>
              <td><pre>{text || " "}</pre>{named.length > 0 && <div class="calls">
                {named.slice(0, 4).map((one) => <Call node={one} code={picture?.at(one, last)} paint={paint} badge={badges.get(one.key)} onSelect={onSelect} />)}
                {named.length > 4 && <small>and {named.length - 4} more</small>}
              </div>}</td>
            </tr>
          );
        })}
      </tbody></table>
    </div>
  );
}

/** Without the indentation that all lines have, and empty lines at the end. */
function trimmed(lines: Answer["lines"]): Answer["lines"] {
  const full = lines.filter(([text]) => text.trim());
  const margin = Math.min(...full.map(([text]) => text.length - text.trimStart().length));
  const last = lines.findLastIndex(([text]) => text.trim());
  return lines.slice(0, last + 1).map(([text, calls]) => [text.slice(margin), calls]);
}

const owned = (node: Node, one: Node): boolean => node.site === one.site || node.site.startsWith(`${one.site}[`) || node.site.startsWith(`${one.site}:`);

function Call({ node, code, paint, badge, onSelect }: { node: Node; code: number | undefined; paint: (code: number) => number; badge: Severity | undefined; onSelect: (node: Node) => void }) {
  const packed = code === undefined ? 0 : paint(code);
  const colour = packed ? css([packed & 255, (packed >> 8) & 255, (packed >> 16) & 255]) : "transparent";
  return (
    <button type="button" class="call" title={key(node.model, node.site)} onClick={() => onSelect(node)}>
      <i style={px({ background: colour })} />{node.site} {code !== undefined && <small>{isNumber(code) ? `rms ${say(code, number)}` : say(code, number)}</small>}
      {badge && <span class={`badge ${badge}`}>{MARKS[badge]}</span>}
    </button>
  );
}
